"""One oracle for the session. Without torch its tests are skipped, unless HEX_LLM_REQUIRE_ORACLE=1 forbids that."""

import os

import pytest

from tests.parity.many_devices import ManyDevices
from tests.parity.oracle import Oracle, OracleMissingError


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
def many_devices(tmp_path_factory):
    process = ManyDevices(tmp_path_factory.mktemp("many_devices"))
    yield process
    process.close()
