"""Products of tokens in float8_e4m3fn with weights of 4 bits on Hopper: `gpu`'s kernel, by `gpu_w4a8_multiply`."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.chain import MAX_TOKENS
from hex_llm.kernels.matmul.reference import total
from hex_llm.kernels.quant_matmul import gpu, gpu_rows
from hex_llm.kernels.quant_matmul.gpu_plan import Plan, plan_w4a8, plan_w4a8_for_many
from hex_llm.kernels.quant_matmul.gpu_w4a8_multiply import padded
from hex_llm.kernels.quant_matmul.rows import Rows, Tokens, taken_by
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, HOPPER_ROWS, Packed


def supports(x: Tokens, weight: Packed, *, activation: Activation | None = None) -> bool:
    """Whether `parts` takes [M, in] x [out, in]."""
    unit = HOPPER_ROWS if activation is None else 2 * HOPPER_ROWS
    known = activation in (None, "silu", "gelu") and x.dtype == jnp.bfloat16
    is_one = weight.layout == "hopper8" and weight.data.ndim == 4
    return known and is_one and 0 < x.shape[0] <= MAX_TOKENS and weight.shape[0] % unit == 0


@functools.partial(jax.jit, static_argnames=("dtype", "plan", "activation"))
def parts(
    x: Tokens,
    weight: Packed,
    *,
    dtype: jnp.dtype | None = None,
    plan: Plan | None = None,
    activation: Activation | None = None,
) -> Array:
    """As `gpu.parts`, of tokens that are in 8 bits, or are brought to them."""
    tokens = x.shape[0]
    plan = plan or plan_w4a8(tokens, *weight.shape, gated=activation is not None)
    dtype = jnp.dtype(jnp.float32 if plan.splits > 1 else dtype or x.dtype)
    return _product(x, weight, padded(tokens), dtype, plan, activation)


def matmul(x: Tokens, weight: Packed, *, dtype: jnp.dtype | None = None, plan: Plan | None = None) -> Array:
    """See `reference.matmul`."""
    dtype = jnp.dtype(dtype or x.dtype)
    if x.shape[0] <= MAX_TOKENS:
        return total(parts(x, weight, dtype=dtype, plan=plan))[: x.shape[0]].astype(dtype)
    return _many(x, weight, dtype, plan or plan_w4a8_for_many(x.shape[0], *weight.shape))


def gated_matmul(x: Tokens, weight: Packed, activation: Activation, *, plan: Plan | None = None) -> Array:
    """See `reference.gated_matmul`."""
    return parts(x, weight, plan=plan, activation=activation)[0, : x.shape[0]]


@functools.partial(jax.jit, static_argnames=("dtype", "plan"))
def _many(x: Tokens, weight: Packed, dtype: jnp.dtype, plan: Plan) -> Array:
    tokens, width = x.shape[0], plan.tokens or padded(x.shape[0])
    return _product(x, weight, -(-tokens // width) * width, dtype, plan, None)[0, :tokens]


def _product(
    x: Tokens, weight: Packed, count: int, dtype: jnp.dtype, plan: Plan, activation: Activation | None
) -> Array:
    """With so many tokens, which are filled up with zeros."""
    rows = x if isinstance(x, Rows) else gpu_rows.quantize(x, taken_by(weight))
    values, scale = rows.values[:count], rows.scale[:count]
    more = count - values.shape[0]
    if more:
        values, scale = jnp.pad(values, ((0, more), (0, 0))), jnp.pad(scale, (0, more))
    sums = jnp.sum(values.astype(jnp.float32).reshape(count, -1, HOPPER_COLUMNS), axis=2).T
    return gpu.call(values, weight, dtype, plan, activation, gpu.Known(scale, sums))
