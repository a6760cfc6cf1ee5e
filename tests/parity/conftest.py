"""One oracle for the session. Without torch its tests are skipped, unless HEX_LLM_REQUIRE_ORACLE=1 forbids that."""

import os

import pytest

from tests.parity.oracle import Oracle, OracleMissingError
from tests.parity.two_devices import TwoDevices


@pytest.fixture(scope="session")
def oracle(tmp_path_factory):
    try:
        oracle = Oracle(tmp_path_factory.mktemp("oracle"))
    except OracleMissingError as error:
        if os.environ.get("HEX_LLM_REQUIRE_ORACLE") == "1":
            pytest.fail(f"HEX_LLM_REQUIRE_ORACLE=1, but {error}")
        pytest.skip(f"no oracle: {error}")
    yield oracle
    oracle.close()


@pytest.fixture(scope="session")
def two_devices(tmp_path_factory):
    process = TwoDevices(tmp_path_factory.mktemp("two_devices"))
    yield process
    process.close()
