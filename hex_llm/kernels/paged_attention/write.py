"""Putting a step's keys and values into their pages."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.batch import Batch


def write_pages(pages: Array, k: Array, v: Array, batch: Batch) -> Array:
    """Pages [P, 2, K, page, H] with k and v [T, K, H] written at the batch's places."""
    kv = jnp.stack([k, v], axis=1).astype(pages.dtype)
    return pages.at[batch.write_page, :, :, batch.write_offset].set(kv)
