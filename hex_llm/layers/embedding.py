"""From tokens to the stream of a model, and from there to scores of tokens. A device has a part of the vocabulary."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.quant_matmul.weight import Matrix
from hex_llm.layers.linear import linear_float32
from hex_llm.parallel.manual import device_index, is_split, join_over_devices, num_devices, own_share, sum_over_devices


def embed(table: Array, tokens: Array, scale: float | None = None) -> Array:
    """[T] -> [T, D], times `scale`, which is rounded to the type of the table as models were trained."""
    if is_split():
        own = tokens - device_index() * table.shape[0]
        there = (own >= 0) & (own < table.shape[0])
        x = sum_over_devices(jnp.where(there[:, None], table[jnp.where(there, own, 0)], jnp.zeros((), table.dtype)))
    else:
        x = table[tokens]
    return x if scale is None else x * jnp.asarray(scale, x.dtype)


def score(x: Array, head: Matrix, soft_cap: float | None = None) -> Array:
    """[R, D] x [V, D] -> [R, V] float32: where devices have a part of the vocabulary each, of that part."""
    logits = linear_float32(x, head)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def without_filling(logits: Array, vocab_size: int) -> Array:
    """A device's scores, with -inf in place of those of tokens that only fill up its part."""
    if not is_split() or logits.shape[1] * num_devices() == vocab_size:
        return logits
    token = device_index() * logits.shape[1] + jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where((token < vocab_size)[None, :], logits, -jnp.inf)


def whole(logits: Array, vocab_size: int) -> Array:
    """[R, V], from the devices' parts, or from what is whole already. What fills up the last part goes."""
    return logits if logits.shape[1] == vocab_size else join_over_devices(logits, axis=1)[:, :vocab_size]


def share(logits: Array) -> Array:
    """[R, V] that all devices have -> each one's part, as `whole` takes it; the last is filled up with -inf."""
    if not is_split():
        return logits
    filling = -logits.shape[1] % num_devices()
    return own_share(jnp.pad(logits, ((0, 0), (0, filling)), constant_values=-jnp.inf), axis=1)
