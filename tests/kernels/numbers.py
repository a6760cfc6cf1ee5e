"""Numbers for kernels to work on."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def normal(seed: int, *shape: int, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """By numpy: JAX's own would be compiled for every shape, which takes longer than many a kernel."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)
