"""From tokens to the stream of a model, and from there to scores of tokens. A device has a part of the vocabulary."""

import jax.numpy as jnp
from jax import Array

from hex_llm.layers.linear import linear_float32
from hex_llm.parallel.manual import device_index, is_split, join_over_devices, sum_over_devices


def embed(table: Array, tokens: Array, scale: float | None = None) -> Array:
    """[T] -> [T, D], times `scale`, which is rounded to the type of the table as models were trained."""
    if is_split():
        own = tokens - device_index() * table.shape[0]
        there = (own >= 0) & (own < table.shape[0])
        x = sum_over_devices(jnp.where(there[:, None], table[jnp.where(there, own, 0)], jnp.zeros((), table.dtype)))
    else:
        x = table[tokens]
    return x if scale is None else x * jnp.asarray(scale, x.dtype)


def score(x: Array, head: Array, soft_cap: float | None = None) -> Array:
    """[R, D] x [V, D] -> [R, V] float32."""
    logits = linear_float32(x, head)
    if is_split():
        logits = join_over_devices(logits, axis=1)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
