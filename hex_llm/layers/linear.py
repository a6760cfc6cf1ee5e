"""Multiplying rows by a weight [out, in]: as it lies in the checkpoint, or in few bits; with what adapters add."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.lora_matmul import api as lora_api
from hex_llm.kernels.lora_matmul.weight import Adapted
from hex_llm.kernels.matmul import api
from hex_llm.kernels.matmul.reference import total
from hex_llm.kernels.quant_matmul import api as quant_api
from hex_llm.kernels.quant_matmul.rows import EightBits, Rows, Tokens
from hex_llm.kernels.quant_matmul.weight import Matrix, Packed
from hex_llm.parallel.backend import backend
from hex_llm.parallel.manual import is_split, join_over_devices, sum_over_devices


def kernels_of(weight: Matrix | Adapted) -> ModuleType:
    """Those of a chain (`takes`, `parts`, `gated_matmul`) that do such weights."""
    if isinstance(weight, Adapted):
        return lora_api
    return quant_api if isinstance(weight, Packed) else api


def taken_in_8_bits(x: Any, weight: Matrix | Adapted) -> EightBits | None:
    """How a kernel in front is to give tokens [M, in], of which `x` tells the shape and type, to a product with the
    weight: in 8 bits, or as they are. Adapters multiply them as they are."""
    return None if isinstance(weight, Adapted) else quant_api.rows_for(x, weight)


def linear_parts(x: Tokens, weight: Matrix | Adapted) -> Array:
    """[R, in] x [out, in] -> [n, R or more, out], to be added and rounded to the type of `x` by what comes next.

    Rows past R mean nothing. A bias is left to what comes next, too.
    """
    kernels = kernels_of(weight)
    if kernels.takes(x, weight):
        return kernels.parts(x, weight)
    if isinstance(weight, Adapted):
        return _with_adapters(linear_parts(x, weight.weight), x, weight)
    return linear(x, weight)[None]


def linear_share(x: Tokens, weight: Matrix | Adapted) -> Array:
    """As `linear_parts`, where devices may each hold a share of `in`: a device's part of the sum."""
    if is_split() and isinstance(weight, Adapted):
        # Of the first of a pair a device has the columns that it has of the weight, so that this is a part of it, too.
        return _with_adapters(linear_share(x, weight.weight), x, weight)
    if is_split() and isinstance(weight, Packed) and weight.order is not None:
        assert not isinstance(x, Rows), "devices that share the work have tokens as they are"
        x = join_over_devices(x, axis=1)  # a device's columns may be anybody's
    return linear_parts(x, weight)


def linear_summed(x: Tokens, weight: Matrix | Adapted, bias: Array | None = None) -> Array:
    """As `linear_parts`, with the bias, where devices may each hold a share of `in`: their sum."""
    if bias is None:
        return summed(linear_share(x, weight), x.dtype)
    if not is_split():
        return linear(x, weight, bias)[None]
    out = summed(linear_share(x, weight), x.dtype).astype(jnp.float32)
    return (out + bias.astype(jnp.float32)[None, None, :]).astype(x.dtype)


def summed(parts: Array, dtype: Any) -> Array:
    """Parts of a sum of which devices may each have a share: those of the whole."""
    if not is_split():
        return parts
    # Added here in float32, and sent as narrow as the tokens are.
    return sum_over_devices(total(parts).astype(dtype))[None]


def linear(x: Tokens, weight: Matrix | Adapted, bias: Array | None = None) -> Array:
    """[R, in] x [out, in] -> [R, out] in the type of `x`, to which the sum, made in float32, is rounded."""
    if isinstance(weight, Adapted):
        out = total(linear_parts(x, weight))[: x.shape[0]]
        return (out if bias is None else out + bias.astype(jnp.float32)[None, :]).astype(x.dtype)
    if backend() == "cpu" or (isinstance(weight, Packed) and bias is not None):
        return linear_float32(x, weight, bias).astype(x.dtype)
    # Asked for float32 and then for less, a library's product would write out the float32 first.
    out = _product(x, weight, x.dtype)
    return out if bias is None else out + bias.astype(x.dtype)[None, :]


def linear_float32(x: Tokens, weight: Matrix, bias: Array | None = None) -> Array:
    """As `linear`, but left in float32: for logits, which sampling compares."""
    if isinstance(weight, Packed) or isinstance(x, Rows):
        out = _product(x, weight, jnp.float32)
    elif api.takes(x, weight):
        out = jnp.sum(api.parts(x, weight, dtype=jnp.dtype(jnp.float32)), axis=0)[: x.shape[0]]
    elif x.shape[0] == 1 and weight.dtype.itemsize < 4 and backend() == "cpu":
        # As a product, XLA's CPU backend would write out a float32 copy of the weight first: 85 ms where this sum,
        # which it fuses with the conversion, takes 6.
        out = jnp.sum(weight.astype(jnp.float32) * x.astype(jnp.float32), axis=1)[None, :]
    else:
        out = _product(x, weight, jnp.float32)
    return out if bias is None else out + bias.astype(jnp.float32)[None, :]


def _with_adapters(parts: Array, x: Tokens, weight: Adapted) -> Array:
    """[n, R or more, out] -> [1, R, out] float32, of rows that are tokens."""
    assert not isinstance(x, Rows), "adapters multiply tokens as they are"
    added = lora_api.lora_matmul(x, weight.pairs, weight.own)
    return (total(parts)[: added.shape[0]].astype(jnp.float32) + added)[None]


def _product(x: Tokens, weight: Matrix, dtype: Any) -> Array:
    if isinstance(weight, Packed):
        return quant_api.matmul(x, weight, dtype=jnp.dtype(dtype))
    assert not isinstance(x, Rows), "tokens in 8 bits are for weights in 8 bits"
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
