"""The plain layout: codes in rows and columns as the weight has them, two of 4 bits in a byte."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.quant_matmul.weight import Codes, Packed, bits


def pack(codes: Codes) -> Packed:
    data = codes.codes
    if bits(codes.coding) == 4:
        data = data[..., 0::2] | data[..., 1::2] << 4
    return Packed(
        data=data,
        scale=codes.scale,
        # A zero is a whole number: bfloat16 has all of those up to 256.
        zero=None if codes.zero is None else codes.zero.astype(jnp.bfloat16),
        order=codes.order,
        input_scale=codes.input_scale,
        coding=codes.coding,
        layout="plain",
    )


def unpack(weight: Packed) -> Codes:
    return Codes(
        codes=_codes(weight),
        scale=weight.scale.astype(jnp.float32),
        zero=None if weight.zero is None else weight.zero.astype(jnp.float32),
        order=weight.order,
        input_scale=weight.input_scale,
        coding=weight.coding,
    )


def _codes(weight: Packed) -> Array:
    if bits(weight.coding) == 8:
        return weight.data
    both = jnp.stack([weight.data & 15, weight.data >> 4], axis=-1)
    return both.reshape(*weight.data.shape[:-1], -1)
