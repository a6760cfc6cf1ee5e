"""The pages of a layer: an array of keys and values, or whole numbers of 8 bits with their scales."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels import float8
from hex_llm.kernels.batch import Batch
from hex_llm.pytree import pytree

INT8_LARGEST = 127.0
SCALE = jnp.float32


@pytree
class Scaled:
    """Each token's numbers of a head have a scale, by which the largest of them is INT8_LARGEST."""

    numbers: Array  # [P, 2, K, page, H] int8
    scales: Array  # [P, 2, K, page] float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def dtype(self) -> Any:
        return self.numbers.dtype


type Pages = Array | Scaled


def rounded(x: Array, dtype: Any) -> Pages:
    """Keys and values [..., H] as pages of that type have them.

    What is too large for fp8 becomes the largest there is: rounding alone would make it NaN.
    """
    match jnp.dtype(dtype):
        case jnp.int8:
            wide = x.astype(jnp.float32)
            scales = jnp.max(jnp.abs(wide), axis=-1) / INT8_LARGEST
            return Scaled(whole_numbers(wide, scales[..., None]), scales)
        case jnp.float8_e4m3fn:
            return jnp.minimum(jnp.maximum(x.astype(jnp.float32), -float8.LARGEST), float8.LARGEST).astype(dtype)
        case _:
            return x.astype(dtype)


def whole_numbers(x: Array, scales: Array) -> Array:
    """Of `x` in units of the scales, of the same shape; 0 where the scale is."""
    return jnp.round(x / jnp.where(scales > 0, scales, 1)).astype(jnp.int8)


def value(pages: Pages) -> Array:
    """The numbers that pages, or some of them, stand for."""
    return pages.numbers.astype(SCALE) * pages.scales[..., None] if isinstance(pages, Scaled) else pages


def write_pages(pages: Pages, k: Array, v: Array, batch: Batch) -> Pages:
    """Pages [P, 2, K, page, H] with k and v [T, K, H] written at the batch's places."""

    def write(pages: Array, kv: Array) -> Array:
        return pages.at[batch.write_page, :, :, batch.write_offset].set(kv)

    return jax.tree.map(write, pages, rounded(jnp.stack([k, v], axis=1), pages.dtype))


def packed_width(width: int, dtype: Any) -> int:
    """Of a head of that width in pages that are packed."""
    return width + (jnp.dtype(SCALE).itemsize if jnp.dtype(dtype) == jnp.int8 else 0)


def packed(pages: Pages) -> Array:
    """Pages as one array: behind a token's whole numbers come the bytes of its scale."""
    if not isinstance(pages, Scaled):
        return pages
    return jnp.concatenate([pages.numbers, lax.bitcast_convert_type(pages.scales, jnp.int8)], axis=-1)


def unpacked(pages: Array) -> Pages:
    """What was packed."""
    if pages.dtype != jnp.int8:
        return pages
    width = pages.shape[-1] - jnp.dtype(SCALE).itemsize
    return Scaled(pages[..., :width], lax.bitcast_convert_type(pages[..., width:], SCALE))
