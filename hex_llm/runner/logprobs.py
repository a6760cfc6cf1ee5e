"""Log-probabilities of tokens, from the logits as the model made them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from hex_llm.engine.sampling import MAX_LOGPROBS
from hex_llm.models import decoder
from hex_llm.models.arch import Arch

PROMPT_ROWS = 64  # prompt tokens whose logits are held at a time
CHUNKS = 128  # of a large vocabulary; more than the likeliest that are asked for


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
    top, top_ids = _top_k(logits, k)
    return TokenLogprobs(own[:, 0] - norm, rank, top_ids, top - norm[:, None])


def _top_k(logits: Array, k: int) -> tuple[Array, Array]:
    """As lax.top_k, which sorts: here only the chunks that can hold any of them, those with the k highest peaks."""
    rows, vocab = logits.shape
    if vocab < CHUNKS * CHUNKS:
        return lax.top_k(logits, k)
    padding = -vocab % CHUNKS
    chunks = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(rows, CHUNKS, -1)
    # In the order of the vocabulary, so that of equal ones the first come first.
    wanted = jnp.sort(lax.top_k(jnp.max(chunks, axis=-1), k)[1], axis=-1)
    candidates = jnp.take_along_axis(chunks, wanted[:, :, None], axis=1)
    top, place = lax.top_k(candidates.reshape(rows, -1), k)
    size = chunks.shape[-1]
    return top, jnp.take_along_axis(wanted, place // size, axis=-1) * size + place % size


def pack_logprobs(logits: Array, tokens: Array) -> Array:
    """[R, V], [R] -> [R, 2 + 2k] int32: the token's log-probability, its rank, the likeliest ids and theirs."""
    own, rank, top_ids, top = token_logprobs(logits, tokens, min(MAX_LOGPROBS, logits.shape[1]))
    bits = lax.bitcast_convert_type(jnp.concatenate([own[:, None], top], axis=1), jnp.int32)
    return jnp.concatenate([bits[:, :1], rank[:, None], top_ids, bits[:, 1:]], axis=1)


def prompt_logprobs(params: Any, hidden: Array, targets: Array, *, arch: Arch) -> Array:
    """Of each token's successor in `targets`, packed as above: [T, D], [T + 1] -> [T, 2 + 2k] int32.

    The last of `targets` says how many of the tokens have one. A few rows are done at a time: the logits of a whole
    prompt would not fit.
    """
    target, num_wanted = targets[:-1], targets[-1]
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
