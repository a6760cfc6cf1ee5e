import os

# Without a thread for each warpgroup the simulator hangs: see the conftest of all tests.
os.environ.setdefault("PJRT_NPROC", "8")

import pytest

from tests.kernels.simulator import simulation


@pytest.fixture
def simulator():
    """Runs kernels in Pallas' GPU simulator; fails if that saw a race."""
    with simulation() as early_reads:
        yield early_reads
