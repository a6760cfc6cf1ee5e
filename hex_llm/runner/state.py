"""What the device remembers of each slot from step to step."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hex_llm.engine.request import Request
from hex_llm.engine.sampling import MAX_RULES
from hex_llm.pytree import pytree
from hex_llm.runner.buckets import Variant
from hex_llm.runner.layout import MAX_RULE_PREFIX, Shapes

FOREVER = np.iinfo(np.int32).max


@pytree
class Slots:
    """What every step reads and writes. One row per slot, and one more that padding may write to."""

    last_token: Array  # [R+1] int32
    page_table: Array  # [R+1, B] int32


@pytree
class History:
    """What the variants from RULED on need, in rows as those of `Slots`."""

    counts: Array  # [R+1, V] int32: 2 x the times a token stands in the output, + 1 if it stands in the prompt
    recent: Array  # [R+1, P] int32: the last tokens of the output, -1 where there are none yet
    rule_ids: Array  # [R+1, N] int32, -1: no rule
    rule_bias: Array  # [R+1, N] float32
    rule_until: Array  # [R+1, N] int32
    rule_prefix: Array  # [R+1, N, P] int32


def empty_slots(shapes: Shapes) -> Slots:
    rows = shapes.num_slots + 1
    return Slots(
        last_token=jnp.zeros(rows, jnp.int32),
        page_table=jnp.zeros((rows, shapes.table_width), jnp.int32),
    )


def empty_history(shapes: Shapes) -> History:
    rows = shapes.num_slots + 1
    return History(
        counts=jnp.zeros((rows, shapes.vocab_size), jnp.int32),
        recent=jnp.full((rows, MAX_RULE_PREFIX), -1, jnp.int32),
        rule_ids=jnp.full((rows, MAX_RULES), -1, jnp.int32),
        rule_bias=jnp.zeros((rows, MAX_RULES), jnp.float32),
        rule_until=jnp.zeros((rows, MAX_RULES), jnp.int32),
        rule_prefix=jnp.full((rows, MAX_RULES, MAX_RULE_PREFIX), -1, jnp.int32),
    )


def needed_variant(request: Request) -> Variant:
    """What choosing the request's tokens takes at least."""
    sampling = request.sampling
    if sampling.logprobs is not None:
        return Variant.SCORED
    if (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or bool(sampling.logit_bias)
        or bool(request.bad_words)
        or sampling.min_tokens > 0
    ):
        return Variant.RULED
    if sampling.temperature == 0 or sampling.top_k == 1:
        return Variant.GREEDY
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return Variant.FILTERED if filtered else Variant.DRAWN


def pack_admission(request: Request, shapes: Shapes) -> np.ndarray:
    """What `admit` has to know of a request that gets a slot, in one array."""
    rules: list[tuple[int, float, int, tuple[int, ...]]] = []
    rules += [(token, bias, FOREVER, ()) for token, bias in request.sampling.logit_bias.items()]
    rules += [(word[-1], -np.inf, FOREVER, word[:-1]) for word in request.bad_words]
    if request.sampling.min_tokens:
        until = len(request.prompt) + request.sampling.min_tokens
        rules += [(token, -np.inf, until, ()) for token in request.stop_ids]
    assert len(rules) <= MAX_RULES, "refused when the request was made"

    ids = np.full(MAX_RULES, -1, np.int32)
    bias = np.zeros(MAX_RULES, np.float32)
    until = np.zeros(MAX_RULES, np.int32)
    prefix = np.full((MAX_RULES, MAX_RULE_PREFIX), -1, np.int32)
    for i, (token, value, last, before) in enumerate(rules):
        ids[i], bias[i], until[i] = token, value, last
        prefix[i, MAX_RULE_PREFIX - len(before) :] = before
    recent = np.full(MAX_RULE_PREFIX, -1, np.int32)
    if tail := request.output[-MAX_RULE_PREFIX:]:
        recent[-len(tail) :] = tail
    tokens = np.zeros(shapes.max_model_len, np.int32)
    tokens[: request.num_known] = request.tokens(0, request.num_known)
    head = np.array([request.slot, len(request.prompt), request.num_known], np.int32)
    return np.concatenate([head, recent, ids, bias.view(np.int32), until, prefix.ravel(), tokens])


def pack_seat(request: Request, shapes: Shapes) -> np.ndarray:
    """The slot that a request gets, and its whole page table."""
    row = np.zeros(packed_seat_size(shapes), np.int32)
    row[0] = request.slot
    row[1 : 1 + len(request.blocks)] = request.blocks
    return row


def packed_seat_size(shapes: Shapes) -> int:
    return 1 + shapes.table_width


def seat(slots: Slots, packed: Array) -> Slots:
    """Writes the page table of a request that joins in a step which only decodes, and so has no room for it."""
    return Slots(last_token=slots.last_token, page_table=slots.page_table.at[packed[0]].set(packed[1:]))


# The sizes of what `pack_admission` joins, but for the tokens, which come last.
_SIZES = (3, MAX_RULE_PREFIX, MAX_RULES, MAX_RULES, MAX_RULES, MAX_RULES * MAX_RULE_PREFIX)


def packed_admission_size(shapes: Shapes) -> int:
    return sum(_SIZES) + shapes.max_model_len


def admit(history: History, packed: Array) -> History:
    """Writes the row of a request that needs its history; its first step follows."""
    head, recent, ids, bias, until, prefix, tokens = jnp.split(packed, np.cumsum(_SIZES))
    slot, num_prompt, num_known = head
    place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    nowhere = history.counts.shape[1]  # out of range: dropped
    counts = jnp.zeros(nowhere, jnp.int32)
    counts = counts.at[jnp.where(place < num_prompt, tokens, nowhere)].set(1, mode="drop")
    in_output = (place >= num_prompt) & (place < num_known)
    counts = counts.at[jnp.where(in_output, tokens, nowhere)].add(2, mode="drop")
    return History(
        counts=history.counts.at[slot].set(counts),
        recent=history.recent.at[slot].set(recent),
        rule_ids=history.rule_ids.at[slot].set(ids),
        rule_bias=history.rule_bias.at[slot].set(jax.lax.bitcast_convert_type(bias, jnp.float32)),
        rule_until=history.rule_until.at[slot].set(until),
        rule_prefix=history.rule_prefix.at[slot].set(prefix.reshape(MAX_RULES, MAX_RULE_PREFIX)),
    )
