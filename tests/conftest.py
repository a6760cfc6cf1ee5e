"""Strict arithmetic in all tests: a silent promotion of type or rank is a bug."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Pallas' GPU simulator lets warpgroups wait for each other in threads of XLA's pool, which needs one for each.
os.environ.setdefault("PJRT_NPROC", "8")
# What is tested is what programs mean, not how well XLA's CPU backend compiles them, which is half of all work here:
# its older emitters and LLVM's first level take half as long. The processes that tests start inherit it.
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_backend_optimization_level=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        os.environ.get("XLA_FLAGS", ""),
    )
)

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def _strict_promotion():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
