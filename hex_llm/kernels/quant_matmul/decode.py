"""What codes stand for, in arithmetic that compilers make vectors of: a table's place in memory has none."""

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.quant_matmul.weight import TABLES, Coding, numbers_of


def decode(codes: Array, coding: Coding) -> Array:
    """One code in each place -> float32 of the same shape: the number, before its zero and its scale.

    Those of fp8 come as bytes.
    """
    match numbers_of(coding):
        case "int8" | "int4":
            return codes.astype(jnp.float32)
        case "fp8":
            return _fp8(codes)
        case "mxfp4":
            return _mxfp4(codes)
        case _:
            return _table(codes, TABLES[coding].tolist())


def _fp8(codes: Array) -> Array:
    """By way of float16, which has a bit more in the exponent, and which machines convert."""
    bits = codes.astype(jnp.uint16)
    size = bits & 0x7F
    size = jnp.where(size == 0x7F, jnp.uint16(0x7E00), size << 7)  # no number stays none
    return _half((bits & 0x80) << 8 | size) * 2.0**8


def _mxfp4(codes: Array) -> Array:
    bits = codes.astype(jnp.uint16)
    return _half((bits & 8) << 12 | (bits & 7) << 9) * 2.0**14


def _half(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _table(codes: Array, values: list[float]) -> Array:
    """Halved by each bit of the code, the lowest first."""
    places = [jnp.float32(value) for value in values]
    for bit in range(len(places).bit_length() - 1):
        is_set = (codes & 1 << bit) != 0
        places = [jnp.where(is_set, odd, even) for even, odd in zip(places[0::2], places[1::2], strict=True)]
    return jnp.asarray(places[0])
