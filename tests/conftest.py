"""Strict arithmetic in all tests: a silent promotion of type or rank is a bug."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Pallas' GPU simulator lets warpgroups wait for each other in threads of XLA's pool, which needs one for each.
os.environ.setdefault("PJRT_NPROC", "8")

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def _strict_promotion():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
