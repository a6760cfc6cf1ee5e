"""What tokens add to a product by their adapters, in plain JAX."""

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.lora_matmul.weight import Own, Pairs


def lora_matmul(x: Array, pairs: Pairs, own: Own) -> Array:
    """[T or more, in] -> [T, out] float32: each token times its own adapter's pairs, or zeros.

    What lies between the two products is rounded to the type of `x`.
    """

    def one(token: Array, number: Array) -> Array:
        slot = jnp.maximum(number - 1, 0)
        narrow = jnp.einsum("pri,i->pr", pairs.down[:, slot].astype(jnp.float32), token.astype(jnp.float32))
        narrow = narrow.astype(x.dtype).astype(jnp.float32)
        added = [up[:, slot].astype(jnp.float32) @ narrow[part] for part, up in enumerate(pairs.up)]
        return jnp.where(number > 0, jnp.concatenate(added), 0.0)

    with jax.default_matmul_precision("highest"):
        return jax.vmap(one)(x[: own.tokens], own.slot)
