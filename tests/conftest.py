"""For all tests: strict arithmetic, since a silent promotion of type or rank is a bug; an order."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Pallas' GPU simulator lets warpgroups wait for each other in threads of XLA's pool, which needs one for each.
os.environ.setdefault("PJRT_NPROC", "8")

from pathlib import Path

import jax
import pytest

# A worker takes one file after the other. These folders have the files of minutes, which come first, so that no worker
# is left alone with one at the end.
_LONGEST = ("tpu", "server", "faults", "multihost", "parity", "kernels", "runner", "quantization", "loader")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return _LONGEST.index(folder) if folder in _LONGEST else len(_LONGEST)

    items.sort(key=turn)


@pytest.fixture(autouse=True, scope="session")
def _strict_promotion():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
