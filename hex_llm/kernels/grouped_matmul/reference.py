"""What the experts of a layer compute, in plain JAX. The implementations are tested against it."""

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.activation import Activation, gated


def experts(
    x: Array,  # [T or more, D]
    gate_up: Array,  # [E, 2F, D], the gate's rows first
    gate_up_bias: Array | None,  # [E, 2F]
    down: Array,  # [E, D, F]
    chosen: Array,  # [T, k] int32: different experts of a token
    share: Array,  # [T, k] float32
    *,
    activation: Activation,
) -> Array:
    """[T, D] float32: each token's experts, each times its share, added. Every expert multiplies every token here."""
    tokens = x[: chosen.shape[0]].astype(jnp.float32)
    both = jnp.einsum("td,efd->etf", tokens, gate_up.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    if gate_up_bias is not None:
        both += gate_up_bias.astype(jnp.float32)[:, None, :]
    size = both.shape[2] // 2
    hidden = gated(activation, both[..., :size], both[..., size:])
    outs = jnp.einsum("etf,edf->etd", hidden, down.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    mine = outs[chosen, jnp.arange(chosen.shape[0])[:, None]]  # [T, k, D]
    return jnp.sum(mine * share[:, :, None], axis=1)
