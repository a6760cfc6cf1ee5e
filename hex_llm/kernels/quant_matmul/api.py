"""Products with weights in few bits: which implementation multiplies, where."""

from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.chain import chained
from hex_llm.kernels.hopper import is_hopper
from hex_llm.kernels.matmul.reference import total
from hex_llm.kernels.quant_matmul import reference, xla, xla_rows
from hex_llm.kernels.quant_matmul.rows import TYPES, EightBits, Rows, Tokens, taken_by
from hex_llm.kernels.quant_matmul.weight import Matrix, Packed


def takes(x: Tokens, weight: Packed, *, activation: Activation | None = None) -> bool:
    """Whether the product of x [M, in] with a weight [out, in], gated where there is one, belongs to a chain."""
    return chained(x.shape[0]) and _kernels_for(weight).supports(x, weight, activation=activation)


def parts(x: Tokens, weight: Packed, *, dtype: jnp.dtype | None = None) -> Array:
    """As `matmul.api.parts`, of what `takes` takes."""
    return _kernels_for(weight).parts(x, weight, dtype=dtype)


def gated_matmul(x: Tokens, weight: Packed, activation: Activation) -> Array:
    """As `matmul.api.gated_matmul`, of what `takes` takes."""
    return _kernels_for(weight).parts(x, weight, activation=activation)[0]


def matmul(x: Tokens, weight: Packed, *, dtype: jnp.dtype) -> Array:
    """[M, in] x [out, in] -> [M, out] in `dtype`; see `reference.matmul`."""
    if takes(x, weight):
        return total(parts(x, weight, dtype=dtype))[: x.shape[0]].astype(dtype)
    if weight.layout in ("hopper", "hopper8"):
        from hex_llm.kernels.quant_matmul import gpu

        return gpu.matmul(x, weight, dtype=dtype)
    if isinstance(x, Rows) or multiplied_as_it_lies(weight):
        return xla_rows.matmul(_rows(x, weight), weight, dtype=dtype)[: x.shape[0]]
    if weight.layout == "tpu":
        from hex_llm.kernels.quant_matmul import tpu

        return tpu.matmul(x, weight, dtype=dtype)
    return xla.matmul(x, weight, dtype=dtype)


def multiplied_as_it_lies(weight: Packed) -> bool:
    """Whether XLA multiplies the codes of a weight in rows and columns: all know whole numbers, Hopper fp8 as well."""
    if weight.layout != "plain" or weight.order is not None or len(weight.shape) != 2:
        return False
    return weight.coding == "w8a8" or (weight.coding == "fp8" and is_hopper())


def rows_for(x: Any, weight: Matrix) -> EightBits | None:
    """How a kernel in front is to give tokens [M, in], of which `x` tells the shape and type, to the weight: in 8 bits,
    or as they are."""
    if not isinstance(weight, Packed) or weight.coding not in TYPES or not takes(x, weight):
        return None
    return taken_by(weight)


def _kernels_for(weight: Packed) -> ModuleType:
    """Those of a chain on Hopper: `supports` and `parts`."""
    # Imported where they are used: Pallas takes a second, which a start on a CPU has better use for.
    from hex_llm.kernels.quant_matmul import gpu, gpu_eight_bits

    return gpu_eight_bits if weight.layout == "plain" and weight.coding in TYPES else gpu


def _rows(x: Tokens, weight: Packed) -> Rows:
    """There may come more of them, by rows of zeros."""
    if isinstance(x, Rows):
        return x
    if is_hopper():
        from hex_llm.kernels.quant_matmul import gpu_rows

        if gpu_rows.supports(x.shape[1]):
            return gpu_rows.quantize(x, taken_by(weight))
    values, scale = reference.quantize_rows(x, taken_by(weight))
    return Rows(values, scale[:, 0], str(x.dtype))
