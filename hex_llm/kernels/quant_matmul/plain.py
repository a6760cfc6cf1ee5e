"""The plain layout: codes in rows and columns as the weight has them, two of 4 bits in a byte.

Those of fp8 are numbers of that type, but on a CPU they are bytes: to take a part of an array of such numbers, XLA's
CPU backend first writes out all of them in 16 bits.
"""

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.quant_matmul.weight import Codes, Packed, bits
from hex_llm.parallel.backend import backend


def pack(codes: Codes) -> Packed:
    data = codes.codes
    if bits(codes.coding) == 4:
        data = data[..., 0::2] | data[..., 1::2] << 4
    elif codes.coding == "fp8" and backend() == "cpu":
        data = lax.bitcast_convert_type(data, jnp.uint8)
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
    if weight.coding == "fp8":
        return lax.bitcast_convert_type(weight.data, jnp.float8_e4m3fn)
    if bits(weight.coding) == 8:
        return weight.data
    both = jnp.stack([weight.data & 15, weight.data >> 4], axis=-1)
    return both.reshape(*weight.data.shape[:-1], -1)
