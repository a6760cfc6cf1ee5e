"""Weights of many bits that are brought to few while they are loaded: to the nearest code, without a look at data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels import float8
from hex_llm.kernels.quant_matmul.weight import Codes, numbers_of
from hex_llm.quantization.modules import HEAD, kept

type Wanted = Literal["int8", "int4", "fp8", "w8a8", "w4a8"]

PLAIN = "weight"  # the name of what is decoded
INT4_GROUP = 128
_INT8_LARGEST, _INT4_LARGEST = 127.0, 15.0
_LEAST_SCALE = 2.0**-100  # above what devices take for zero, with room for what it is multiplied with


@dataclass(frozen=True, slots=True)
class Online:
    """What is wanted of every matrix."""

    coding: Wanted
    group: int | None  # columns of a row that have a scale in common; None: all that a device has

    @property
    def name(self) -> str:
        return f"--quantization={self.coding}"

    @property
    def has_zero(self) -> bool:
        return numbers_of(self.coding) == "int4"

    @property
    def has_order(self) -> bool:
        return False

    @property
    def has_input_scale(self) -> bool:
        return False

    def takes(self, module: str) -> bool:
        return module != HEAD and not kept(module)

    def decode(self, arrays: Mapping[str, Array]) -> Codes:
        weight = arrays[PLAIN].astype(jnp.float32)
        rows, size = weight.shape
        return quantize(weight.reshape(rows, -1, self.group or size), self.coding)


def online(coding: Wanted) -> Online:
    return Online(coding, INT4_GROUP if numbers_of(coding) == "int4" else None)


def quantize(weight: Array, coding: Wanted) -> Codes:
    """[out, groups, columns of a group] float32 -> [out, in]."""
    rows = weight.shape[0]
    zero = None
    match coding:
        case "int8" | "w8a8":
            scale = _scale(jnp.max(jnp.abs(weight), axis=2), _INT8_LARGEST)
            codes = jnp.round(weight / scale[..., None]).astype(jnp.int8)
        case "int4" | "w4a8":
            low, high = (jnp.minimum(jnp.min(weight, axis=2), 0), jnp.maximum(jnp.max(weight, axis=2), 0))
            scale = _scale(high - low, _INT4_LARGEST)
            zero = jnp.round(-low / scale)
            codes = jnp.clip(jnp.round(weight / scale[..., None]) + zero[..., None], 0, _INT4_LARGEST)
            codes = codes.astype(jnp.uint8)
        case "fp8":
            scale = _scale(jnp.max(jnp.abs(weight), axis=2), float8.LARGEST)
            codes = jnp.clip(weight / scale[..., None], -float8.LARGEST, float8.LARGEST).astype(jnp.float8_e4m3fn)
    return Codes(codes.reshape(rows, -1), scale, zero, order=None, input_scale=None, coding=coding)


def _scale(span: Array, codes: float) -> Array:
    """Such that so many codes span it; 1 where all is so small that it becomes zero, since it could not be divided."""
    scale = span / codes
    return jnp.where(scale > _LEAST_SCALE, scale, 1.0)
