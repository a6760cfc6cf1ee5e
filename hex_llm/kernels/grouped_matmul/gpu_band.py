"""The order of a large product's pieces: those that run at the same time share most of what they read in the cache."""

import jax.numpy as jnp
from jax import Array, lax


def in_bands(number: Array, count: Array, across: int, band: int) -> tuple[Array, Array]:
    """(tile of rows, place across) of a piece: down the rows of a band of so many of the `count` tiles, then on."""
    which = lax.div(number, band * across)
    left = number - which * (band * across)
    height = jnp.minimum(band, count - which * band)
    return which * band + lax.rem(left, height), lax.div(left, height)
