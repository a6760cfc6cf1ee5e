"""Random bits from a key and a counter: Threefry-2x32 with 20 rounds (Salmon et al., 2011), as JAX's own keys use.

Written out on whole arrays, a key per row: XLA makes one loop of it, where a key per row by jax.random costs a
third of a second of compilation in every step.
"""

import jax.numpy as jnp
from jax import Array

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two words of 32 random bits for each pair of counters; all arrays are uint32 of one shape."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y
