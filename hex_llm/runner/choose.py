"""The last part of a step: each sequence's next token, from its logits, and what the next step needs of it.

The parts are programs of their own where a step takes what its requests ask for, and one program, `choose_any`, where
that is looked up at run time.

Where devices share the vocabulary, each comes with the logits of its part. The likeliest token is found without putting
them together; whatever else a row asks for is computed from all of them, by every device for itself.
"""

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.engine.sampling import MAX_LOGPROBS
from hex_llm.layers.embedding import share, whole
from hex_llm.runner import sampler
from hex_llm.runner.buckets import Variant
from hex_llm.runner.layout import COLUMNS, FLOAT_COLUMNS, HAS_RULES, SAMPLES
from hex_llm.runner.logits import Penalties, Rules, apply_rules, penalize
from hex_llm.runner.logprobs import pack_logprobs
from hex_llm.runner.sampler import SamplingRows
from hex_llm.runner.state import History, Slots

_CHOOSERS = {
    Variant.GREEDY: sampler.choose_greedy,
    Variant.DRAWN: sampler.choose_drawn,
    Variant.FILTERED: sampler.choose_filtered,
    Variant.ANY: sampler.choose_any,
}


def choose(slots: Slots, logits: Array, rows: Array, *, variant: Variant, vocab_size: int) -> tuple[Slots, Array]:
    """The slots that know their new tokens, and the tokens [R] int32, negative where the logits were of no use."""
    columns = _columns(rows)
    if variant != Variant.GREEDY:
        logits = whole(logits, vocab_size)
    sampling = SamplingRows(
        temperature=columns["temperature"],
        top_p=columns["top_p"],
        top_k=columns["top_k"],
        min_p=columns["min_p"],
        seed=lax.bitcast_convert_type(columns["seed"], jnp.uint32),
        position=columns["kv_len"],  # of the token being sampled: the number of tokens so far
    )
    tokens, usable = _CHOOSERS[variant](logits, sampling)
    last_token = slots.last_token.at[_owner(columns, slots.last_token)].set(tokens)
    return Slots(last_token=last_token, page_table=slots.page_table), jnp.where(usable, tokens, -1)


def process(history: History, logits: Array, rows: Array, *, vocab_size: int) -> Array:
    """Logits with each row's penalties, biases and bans."""
    return share(_processed(history, whole(logits, vocab_size), rows))


def _processed(history: History, logits: Array, rows: Array) -> Array:
    columns = _columns(rows)
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


def remember(history: History, rows: Array, tokens: Array) -> History:
    """The history with a step's tokens."""
    columns = _columns(rows)
    owner, tokens = _owner(columns, history.recent), jnp.maximum(tokens, 0)
    latest = jnp.concatenate([history.recent[owner, 1:], tokens[:, None]], axis=1)
    return History(
        counts=history.counts.at[owner, tokens].add(2),
        recent=history.recent.at[owner].set(latest),
        rule_ids=history.rule_ids,
        rule_bias=history.rule_bias,
        rule_until=history.rule_until,
        rule_prefix=history.rule_prefix,
    )


def score(logits: Array, tokens: Array, *, vocab_size: int) -> Array:
    """What `pack_logprobs` says of the tokens chosen; of those of no use, anything."""
    return pack_logprobs(whole(logits, vocab_size), jnp.maximum(tokens, 0))


def choose_any(
    slots: Slots, history: History, logits: Array, rows: Array, *, vocab_size: int
) -> tuple[Slots, History, Array, Array]:
    """All of it, but for what no row asks for: the new slots and history, the tokens, and what `score` says."""
    logits = whole(logits, vocab_size)
    asked = jnp.any(_columns(rows)["flags"] & HAS_RULES > 0)
    choices = lax.cond(asked, lambda: _processed(history, logits, rows), lambda: logits)
    slots, tokens = choose(slots, choices, rows, variant=Variant.ANY, vocab_size=vocab_size)
    nothing = jnp.zeros((logits.shape[0], 2 + 2 * min(MAX_LOGPROBS, vocab_size)), jnp.int32)
    scores = lax.cond(asked, lambda: score(logits, tokens, vocab_size=vocab_size), lambda: nothing)
    return slots, remember(history, rows, tokens), tokens, scores


def _owner(columns: dict[str, Array], slots: Array) -> Array:
    """The place of each row's slot; the spare one takes what is not kept."""
    return jnp.where(columns["flags"] & SAMPLES > 0, columns["slot"], slots.shape[0] - 1)


def _columns(rows: Array) -> dict[str, Array]:
    return {
        name: lax.bitcast_convert_type(column, jnp.float32) if name in FLOAT_COLUMNS else column
        for name, column in zip(COLUMNS, rows.T, strict=True)
    }
