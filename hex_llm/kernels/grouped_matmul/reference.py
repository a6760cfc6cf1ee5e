"""What the experts of a layer compute, in plain JAX. The implementations are tested against it."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.activation import Activation, gated
from hex_llm.kernels.quant_matmul import reference
from hex_llm.kernels.quant_matmul.weight import Codes, of_expert


def experts(
    x: Array,  # [T or more, D]
    gate_up: Array | Codes,  # [E, 2F, D], the gate's rows first
    gate_up_bias: Array | None,  # [E, 2F]
    down: Array | Codes,  # [E, D, F]
    chosen: Array,  # [T, k] int32: different experts of a token
    share: Array,  # [T, k] float32
    *,
    activation: Activation,
) -> Array:
    """[T, D] float32: each token's experts, each times its share, added. Every expert multiplies every token here."""
    tokens = x[: chosen.shape[0]].astype(jnp.float32)
    both = _product(jnp.broadcast_to(tokens, (gate_up.shape[0], *tokens.shape)), gate_up)
    if gate_up_bias is not None:
        both += gate_up_bias.astype(jnp.float32)[:, None, :]
    size = both.shape[2] // 2
    hidden = gated(activation, both[..., :size], both[..., size:])
    outs = _product(hidden, down)
    mine = outs[chosen, jnp.arange(chosen.shape[0])[:, None]]  # [T, k, D]
    return jnp.sum(mine * share[:, :, None], axis=1)


def _product(x: Array, weight: Array | Codes) -> Array:
    """[E, T, in] x [E, out, in] -> [E, T, out] float32."""
    if not isinstance(weight, Codes):
        return jnp.einsum("eti,eoi->eto", x, weight.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return jax.vmap(lambda rows, expert: reference.matmul(rows, of_expert(weight, expert)))(x, jnp.arange(len(x)))
