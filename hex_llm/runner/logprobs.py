"""Log-probabilities of tokens, from the logits as the model made them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class TokenLogprobs(NamedTuple):
    """Of one token per row: its log-probability and rank, and the likeliest k."""

    own: Array  # [S] float32
    rank: Array  # [S] int32: 1 is the likeliest
    top_ids: Array  # [S, k] int32, the likeliest first
    top: Array  # [S, k] float32


def token_logprobs(logits: Array, tokens: Array, k: int) -> TokenLogprobs:
    """Log-probabilities of `tokens` [S] under logits [S, V] float32. Tokens of equal logit have the same rank."""
    norm = jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    rank = 1 + jnp.sum((logits > own).astype(jnp.int32), axis=-1)
    top, top_ids = lax.top_k(logits, k)
    return TokenLogprobs(own[:, 0] - norm, rank, top_ids, top - norm[:, None])
