"""Which layout a weight in few bits gets, and back."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from hex_llm.kernels.hopper import is_hopper
from hex_llm.kernels.quant_matmul import plain
from hex_llm.kernels.quant_matmul.rows import TYPES
from hex_llm.kernels.quant_matmul.weight import W4A8_COLUMNS, Codes, Packed, numbers_of
from hex_llm.parallel.backend import backend


def pack(codes: Codes, dtype: Any = jnp.bfloat16) -> Packed:
    """The weight, or a device's share of it, in the layout that the kernel for it takes, with tokens of `dtype`.

    To be traced. A weight of a coding that also rounds tokens may not be one that such a product is for: it multiplies
    them as they are.
    """
    if numbers_of(codes.coding) != codes.coding and not _rounds_tokens(codes):
        codes = replace(codes, input_scale=None, coding=numbers_of(codes.coding))
    return _best(codes, dtype).pack(codes)


def _rounds_tokens(codes: Codes) -> bool:
    """Those of experts do not, and those of w4a8 only in the order in which groups are."""
    if len(codes.shape) != 2:
        return False
    groups = codes.scale.shape[-1]
    return codes.coding != "w4a8" or (
        codes.order is None and (groups == 1 or codes.shape[-1] // groups % W4A8_COLUMNS == 0)
    )


def _best(codes: Codes, dtype: Any) -> Any:
    # Imported where it is used: Pallas takes a second, which a start on a CPU has better use for.
    if dtype != jnp.bfloat16:
        return plain
    if is_hopper():
        from hex_llm.kernels.quant_matmul import gpu_expert_layout, gpu_layout, gpu_w4a8_layout

        if gpu_w4a8_layout.supports(codes):
            return gpu_w4a8_layout
        is_one = len(codes.shape) == 2
        if is_one and codes.coding in TYPES:
            return plain  # 8 bits are multiplied as they are
        layout = gpu_layout if is_one else gpu_expert_layout
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
        case "hopper8":
            from hex_llm.kernels.quant_matmul import gpu_w4a8_layout

            return gpu_w4a8_layout.unpack(weight)
        case "tpu":
            from hex_llm.kernels.quant_matmul import tpu_layout

            return tpu_layout.unpack(weight)
