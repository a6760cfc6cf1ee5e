"""Putting a step's keys and values into their pages."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.batch import Batch

FP8_LARGEST = 448.0  # of float8_e4m3fn


def write_pages(pages: Array, k: Array, v: Array, batch: Batch) -> Array:
    """Pages [P, 2, K, page, H] with k and v [T, K, H] written at the batch's places."""
    kv = narrowed(jnp.stack([k, v], axis=1), pages.dtype)
    return pages.at[batch.write_page, :, :, batch.write_offset].set(kv)


def narrowed(x: Array, dtype: Any) -> Array:
    """Rounded to the type of pages. What is too large for 8 bits becomes the largest there is: rounding alone would
    make it NaN."""
    if dtype == jnp.float8_e4m3fn:
        x = jnp.minimum(jnp.maximum(x.astype(jnp.float32), -FP8_LARGEST), FP8_LARGEST)
    return x.astype(dtype)
