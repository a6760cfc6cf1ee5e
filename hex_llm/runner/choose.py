"""The last part of a step: each sequence's next token, from its logits, and what the next step needs of it."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.engine.sampling import MAX_LOGPROBS
from hex_llm.pytree import pytree
from hex_llm.runner.buckets import Variant
from hex_llm.runner.layout import COLUMNS, FLOAT_COLUMNS, HAS_RULES, SAMPLES
from hex_llm.runner.logits import Penalties, Rules, apply_rules, penalize
from hex_llm.runner.logprobs import pack_logprobs
from hex_llm.runner.sampler import SamplingRows, choose_any, choose_drawn, choose_filtered, choose_greedy
from hex_llm.runner.state import History, Slots

_CHOOSERS = {
    Variant.GREEDY: choose_greedy,
    Variant.DRAWN: choose_drawn,
    Variant.FILTERED: choose_filtered,
    Variant.RULED: choose_filtered,
    Variant.SCORED: choose_filtered,
    Variant.ANY: choose_any,
}


@pytree
class Chosen:
    """What comes back to the host."""

    tokens: Array  # [S] int32, negative where the logits were of no use
    logprobs: Array | None  # [S, 2 + 2k] int32, packed as `pack_logprobs` does


def choose(
    slots: Slots, history: History, logits: Array, rows: Array, *, variant: Variant
) -> tuple[Slots, History, Chosen]:
    columns = _columns(rows)
    asked = jnp.any(columns["flags"] & HAS_RULES > 0)
    ruled = variant >= Variant.RULED
    choices = _extra(ruled, variant, asked, lambda: _process(logits, history, columns), lambda: logits)
    sampling = SamplingRows(
        temperature=columns["temperature"],
        top_p=columns["top_p"],
        top_k=columns["top_k"],
        min_p=columns["min_p"],
        seed=lax.bitcast_convert_type(columns["seed"], jnp.uint32),
        position=columns["kv_len"],  # of the token being sampled: the number of tokens so far
    )
    tokens, usable = _CHOOSERS[variant](choices, sampling)

    # The spare row takes what is not kept.
    owner = jnp.where(columns["flags"] & SAMPLES > 0, columns["slot"], slots.last_token.shape[0] - 1)
    slots = Slots(last_token=slots.last_token.at[owner].set(tokens), page_table=slots.page_table)
    logprobs = None
    if variant >= Variant.SCORED:
        logprobs = _extra(True, variant, asked, lambda: pack_logprobs(logits, tokens), lambda: _no_logprobs(logits))
    chosen = Chosen(jnp.where(usable, tokens, -1), logprobs)
    return slots, _remember(history, owner, tokens) if ruled else history, chosen


def _extra(
    wanted: bool, variant: Variant, asked: Array, compute: Callable[[], Array], otherwise: Callable[[], Array]
) -> Array:
    """What a variant is there for, and ANY does where a request of the step asks for it."""
    if variant == Variant.ANY:
        return lax.cond(asked, compute, otherwise)
    return compute() if wanted else otherwise()


def _columns(rows: Array) -> dict[str, Array]:
    return {
        name: lax.bitcast_convert_type(column, jnp.float32) if name in FLOAT_COLUMNS else column
        for name, column in zip(COLUMNS, rows.T, strict=True)
    }


def _process(logits: Array, history: History, columns: dict[str, Array]) -> Array:
    slot = columns["slot"]
    # A request without rules of its own may sit where one with rules sat before.
    has_rules = (columns["flags"] & HAS_RULES > 0)[:, None]
    rules = Rules(
        ids=jnp.where(has_rules, history.rule_ids[slot], -1),
        bias=history.rule_bias[slot],
        until=history.rule_until[slot],
        prefix=history.rule_prefix[slot],
        recent=history.recent[slot],
    )
    penalties = Penalties(
        repetition=columns["repetition"],
        presence=columns["presence"],
        frequency=columns["frequency"],
        counts=history.counts[slot],
    )
    return penalize(apply_rules(logits, rules, columns["kv_len"]), penalties)


def _remember(history: History, owner: Array, tokens: Array) -> History:
    latest = jnp.concatenate([history.recent[owner, 1:], tokens[:, None]], axis=1)
    return History(
        counts=history.counts.at[owner, tokens].add(2),
        recent=history.recent.at[owner].set(latest),
        rule_ids=history.rule_ids,
        rule_bias=history.rule_bias,
        rule_until=history.rule_until,
        rule_prefix=history.rule_prefix,
    )


def _no_logprobs(logits: Array) -> Array:
    return jnp.zeros((logits.shape[0], 2 + 2 * min(MAX_LOGPROBS, logits.shape[1])), jnp.int32)
