"""All tokens times the pairs of all slots, and what is not a token's own made zero in between.

A step has tokens of most adapters that are on the device, so that most pairs are read anyway; and so narrow as they
are, all of them together are one product of a usual width.
"""

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.lora_matmul.weight import Own, Pairs


def lora_matmul(x: Array, pairs: Pairs, own: Own) -> Array:
    """As `reference.lora_matmul`."""
    x = x[: own.tokens]
    # [T, parts, slots, rank]
    narrow = jax.lax.dot_general(x, pairs.down, (((1,), (3,)), ((), ())), preferred_element_type=jnp.float32)
    # Not multiplied by 0: what overflows in another's adapter must not become everybody's. (No number of `up` is one
    # that is none, which adapters are looked through for.)
    narrow = jnp.where(own.mask[:, None, :, None] > 0, narrow, 0.0).astype(x.dtype)
    added = [
        jax.lax.dot_general(narrow[:, part], up, (((1, 2), (1, 2)), ((), ())), preferred_element_type=jnp.float32)
        for part, up in enumerate(pairs.up)
    ]
    return jnp.concatenate(added, axis=1)
