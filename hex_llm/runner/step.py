"""The step: everything the device does between one upload and one download.

Unpack, embed, layers, the logits of the last token of each sequence, sampling, and what the next step needs.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.engine.sampling import MAX_LOGPROBS
from hex_llm.kernels.batch import Batch
from hex_llm.models import decoder
from hex_llm.models.arch import Arch
from hex_llm.pytree import pytree
from hex_llm.runner.buckets import Variant
from hex_llm.runner.layout import COLUMNS, FLOAT_COLUMNS, HAS_RULES, SAMPLES, Layout
from hex_llm.runner.logits import Penalties, Rules, apply_rules, finite_rows, penalize
from hex_llm.runner.logprobs import token_logprobs
from hex_llm.runner.sampler import SamplingRows, sample
from hex_llm.runner.state import State

PROMPT_ROWS = 64  # prompt tokens whose logits are held at a time


@pytree
class StepOutput:
    """What comes back to the host. Log-probabilities are packed as `pack_logprobs` does."""

    tokens: Array  # [S] int32, negative where the logits were of no use
    logprobs: Array | None  # [S, 2 + 2k] int32
    prompt_logprobs: Array | None  # [T, 2 + 2k] int32


def step(
    params: Any, kv: tuple[Array, ...], state: State, blob: Array, *, arch: Arch, layout: Layout
) -> tuple[tuple[Array, ...], State, StepOutput]:
    fields = layout.cut(blob)
    variant = layout.bucket.variant
    page_table = _update_page_table(state.page_table, fields)
    batch, last = _batch(fields, state.last_token, page_table, layout)
    hidden, kv = decoder.forward(params, arch, kv, batch)
    logits = decoder.logits(params, arch, hidden[last])  # S V

    slot, position = fields["slot"], batch.kv_len  # the sampled token's position is the number of tokens so far
    columns = _columns(fields["sampling"])
    asked = jnp.any(fields["flags"] & HAS_RULES > 0)
    choices = _extra(variant, asked, lambda: _process(logits, state, fields, columns), lambda: logits)
    rows = SamplingRows(
        temperature=columns["temperature"],
        top_p=columns["top_p"],
        top_k=columns["top_k"],
        min_p=columns["min_p"],
        seed=lax.bitcast_convert_type(columns["seed"], jnp.uint32),
        position=position,
    )
    tokens = sample(choices, rows)
    usable = finite_rows(choices)

    owner = jnp.where(
        fields["flags"] & SAMPLES > 0, slot, layout.shapes.num_slots
    )  # the spare row takes what is not kept
    state = State(
        last_token=state.last_token.at[owner].set(tokens),
        page_table=page_table,
        counts=state.counts if variant == Variant.PLAIN else state.counts.at[owner, tokens].add(2),
        recent=state.recent if variant == Variant.PLAIN else _remember(state.recent, owner, tokens),
        rule_ids=state.rule_ids,
        rule_bias=state.rule_bias,
        rule_until=state.rule_until,
        rule_prefix=state.rule_prefix,
    )
    output = StepOutput(
        tokens=jnp.where(usable, tokens, -1),
        logprobs=(
            None
            if variant == Variant.PLAIN
            else _extra(variant, asked, lambda: pack_logprobs(logits, tokens), lambda: _no_logprobs(logits))
        ),
        prompt_logprobs=(
            _prompt_logprobs(params, arch, hidden, fields["target"], fields["counts"][2])
            if "target" in fields
            else None
        ),
    )
    return kv, state, output


def _extra(variant: Variant, asked: Array, compute: Callable[[], Array], otherwise: Callable[[], Array]) -> Array:
    """What a variant above PLAIN computes, and ANY where a request of the step asks for it."""
    if variant == Variant.ANY:
        return lax.cond(asked, compute, otherwise)
    return otherwise() if variant == Variant.PLAIN else compute()


def _update_page_table(page_table: Array, fields: dict[str, Array]) -> Array:
    if "fresh" in fields:
        page_table = page_table.at[fields["fresh"][:, 0]].set(fields["fresh"][:, 1:])
    slot, index, page = fields["gained"].T
    return page_table.at[slot, index].set(page)


def _batch(fields: dict[str, Array], last_token: Array, page_table: Array, layout: Layout) -> tuple[Batch, Array]:
    """The batch, and for each sequence the place of its last token."""
    bucket, page_size = layout.bucket, layout.shapes.page_size
    tokens = fields["tokens"]
    tokens = jnp.where(tokens < 0, last_token[-1 - jnp.minimum(tokens, -1)], tokens)
    place = jnp.arange(bucket.tokens, dtype=jnp.int32)
    kv_len, table = fields["kv_len"], page_table[fields["slot"]]
    if bucket.decode:
        cu_q, owner, last = None, place, place
        positions = jnp.maximum(kv_len - 1, 0)
    else:
        cu_q = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(fields["length"], dtype=jnp.int32)])
        owner = jnp.searchsorted(cu_q[1:], place, side="right").astype(jnp.int32)
        owner = jnp.minimum(owner, bucket.seqs - 1)
        last = jnp.maximum(cu_q[1:] - 1, 0)
        positions = jnp.where(place < cu_q[-1], kv_len[owner] - cu_q[owner + 1] + place, 0)
    real = kv_len[owner] > 0 if bucket.decode else place < cu_q[-1]  # pyright: ignore[reportOptionalSubscript]
    batch = Batch(
        tokens=tokens,
        positions=positions,
        write_page=jnp.where(real, table[owner, positions // page_size], 0),
        write_offset=positions % page_size,
        cu_q=cu_q,
        kv_len=kv_len,
        page_table=table,
        num_decode=fields["counts"][0] if bucket.decode or layout.shapes.mixed else None,
        num_seqs=fields["counts"][1],
    )
    return batch, last


def _columns(table: Array) -> dict[str, Array]:
    return {
        name: lax.bitcast_convert_type(column, jnp.float32) if name in FLOAT_COLUMNS else column
        for name, column in zip(COLUMNS, table.T, strict=True)
    }


def _process(logits: Array, state: State, fields: dict[str, Array], columns: dict[str, Array]) -> Array:
    slot = fields["slot"]
    # A request without rules of its own may sit where one with rules sat before.
    has_rules = (fields["flags"] & HAS_RULES > 0)[:, None]
    rules = Rules(
        ids=jnp.where(has_rules, state.rule_ids[slot], -1),
        bias=state.rule_bias[slot],
        until=state.rule_until[slot],
        prefix=state.rule_prefix[slot],
        recent=state.recent[slot],
    )
    penalties = Penalties(
        repetition=columns["repetition"],
        presence=columns["presence"],
        frequency=columns["frequency"],
        counts=state.counts[slot],
    )
    return penalize(apply_rules(logits, rules, fields["kv_len"]), penalties)


def _remember(recent: Array, owner: Array, tokens: Array) -> Array:
    return recent.at[owner].set(jnp.concatenate([recent[owner, 1:], tokens[:, None]], axis=1))


def pack_logprobs(logits: Array, tokens: Array) -> Array:
    """[R, V], [R] -> [R, 2 + 2k] int32: the token's log-probability, its rank, the likeliest ids and theirs."""
    own, rank, top_ids, top = token_logprobs(logits, tokens, min(MAX_LOGPROBS, logits.shape[1]))
    bits = lax.bitcast_convert_type(jnp.concatenate([own[:, None], top], axis=1), jnp.int32)
    return jnp.concatenate([bits[:, :1], rank[:, None], top_ids, bits[:, 1:]], axis=1)


def _no_logprobs(logits: Array) -> Array:
    return jnp.zeros((logits.shape[0], 2 + 2 * min(MAX_LOGPROBS, logits.shape[1])), jnp.int32)


def _prompt_logprobs(params: Any, arch: Arch, hidden: Array, target: Array, num_wanted: Array) -> Array:
    """Of the first `num_wanted` tokens, a few rows at a time: the logits of a whole prompt would not fit."""
    num_tokens = target.shape[0]
    rows = min(PROMPT_ROWS, num_tokens)
    padding = -num_tokens % rows
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    target = jnp.pad(target, (0, padding))

    def body(i: Array, packed: Array) -> Array:
        some_hidden, some_target = (lax.dynamic_slice_in_dim(x, i * rows, rows) for x in (hidden, target))
        new = pack_logprobs(decoder.logits(params, arch, some_hidden), some_target)
        return lax.dynamic_update_slice_in_dim(packed, new, i * rows, 0)

    empty = jnp.zeros((num_tokens + padding, 2 + 2 * min(MAX_LOGPROBS, arch.vocab_size)), jnp.int32)
    return lax.fori_loop(0, -(-num_wanted // rows), body, empty)[:num_tokens]
