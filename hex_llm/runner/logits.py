"""Changes logits before a token is sampled from them: penalties, biases and bans."""

import jax.numpy as jnp
from jax import Array

from hex_llm.pytree import pytree

_LARGEST_BIAS = 1e30  # several of them still add up to a finite number


@pytree
class Penalties:
    """Penalties on the tokens a row has seen, with vLLM's meaning.

    `repetition` is about prompt and output, the other two about the output alone.
    """

    repetition: Array  # [S] float32: 1 is none
    presence: Array  # [S] float32: 0 is none
    frequency: Array  # [S] float32: 0 is none
    counts: Array  # [S, V] integer: twice the times a token is in the output, and 1 more if it is in the prompt


@pytree
class Rules:
    """Biases on single tokens, each for as long as its condition holds; -inf bans the token.

    logit_bias is a rule without an end or a prefix, min_tokens one for each stop token with an end, bad_words one for
    each word's last token with the tokens before it as prefix.
    """

    ids: Array  # [S, N] int32: -1 is an empty place
    bias: Array  # [S, N] float32
    until: Array  # [S, N] int32: the rule holds for tokens at positions before this one
    prefix: Array  # [S, N, P] int32: what the last P tokens must be, -1 is any
    recent: Array  # [S, P] int32: the last P tokens, the latest last, -1 before the first


def penalize(logits: Array, penalties: Penalties) -> Array:
    """Logits [S, V] with the penalties of each row."""
    seen = penalties.counts > 0
    times = (penalties.counts >> 1).astype(jnp.float32)
    repetition = penalties.repetition[:, None]
    shrunk = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, shrunk, logits)
    presence = jnp.where(times > 0, penalties.presence[:, None], 0.0)
    return logits - penalties.frequency[:, None] * times - presence


def apply_rules(logits: Array, rules: Rules, position: Array) -> Array:
    """Logits [S, V] with the rules that hold for the tokens sampled at `position` [S]. Biases on one token add up."""
    rows, vocab = logits.shape
    matches = jnp.all((rules.prefix == -1) | (rules.prefix == rules.recent[:, None, :]), axis=-1)
    holds = (rules.ids >= 0) & (position[:, None] < rules.until) & matches
    banned = holds & (rules.bias == -jnp.inf)
    row = jnp.broadcast_to(jnp.arange(rows)[:, None], rules.ids.shape)
    bias = jnp.minimum(rules.bias, _LARGEST_BIAS)
    # A ban is a minimum and no sum, so that it also holds for what is +inf and meets no other bias.
    logits = logits.at[row, jnp.where(holds & ~banned, rules.ids, vocab)].add(bias, mode="drop")
    return logits.at[row, jnp.where(banned, rules.ids, vocab)].min(-jnp.inf, mode="drop")
