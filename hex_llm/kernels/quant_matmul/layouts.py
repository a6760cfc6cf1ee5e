"""Which layout a weight in few bits gets, and back."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from hex_llm.kernels.hopper import is_hopper
from hex_llm.kernels.quant_matmul import plain
from hex_llm.kernels.quant_matmul.weight import Codes, Matrix, Packed
from hex_llm.parallel.backend import backend


def pack(codes: Codes, dtype: Any = jnp.bfloat16) -> Packed:
    """The weight, or a device's share of it, in the layout that the kernel for it takes, with tokens of `dtype`.

    To be traced.
    """
    return _best(codes, dtype).pack(codes)


def _best(codes: Codes, dtype: Any) -> Any:
    # Imported where it is used: Pallas takes a second, which a start on a CPU has better use for.
    if is_hopper() and dtype == jnp.bfloat16 and codes.coding != "fp8":
        from hex_llm.kernels.quant_matmul import gpu_expert_layout, gpu_layout

        layout = gpu_layout if len(codes.shape) == 2 else gpu_expert_layout
        if layout.supports(codes):
            return layout
    if backend() == "tpu":
        from hex_llm.kernels.quant_matmul import tpu_layout

        if tpu_layout.fits(codes):
            return tpu_layout
    return plain


def unpack(weight: Packed) -> Codes:
    """The other way. Scales may have been rounded, groups cut into smaller ones, and columns added that are zero."""
    match weight.layout:
        case "plain":
            return plain.unpack(weight)
        case "hopper":
            from hex_llm.kernels.quant_matmul import gpu_layout

            return gpu_layout.unpack(weight)
        case "tpu":
            from hex_llm.kernels.quant_matmul import tpu_layout

            return tpu_layout.unpack(weight)


def as_plain[M: Matrix](weight: M, size: int) -> M:
    """A weight with `size` columns in the plain layout, for what no kernel of its own layout does. That is made anew in
    every step."""
    if not isinstance(weight, Packed) or weight.layout == "plain":
        return weight
    codes = unpack(weight)
    groups = codes.scale.shape[-1] * size // codes.shape[-1]
    return plain.pack(
        dataclasses.replace(
            codes,
            codes=codes.codes[..., :size],
            scale=codes.scale[..., :groups],
            zero=None if codes.zero is None else codes.zero[..., :groups],
        )
    )
