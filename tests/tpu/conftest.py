"""One compiler for the session. Without libtpu its tests are skipped, unless HEX_LLM_REQUIRE_ORACLE=1 forbids that."""

import os

import pytest

from tests.tpu.compiler import Compiler, CompilerMissingError


@pytest.fixture(scope="session")
def compiler(tmp_path_factory):
    try:
        compiler = Compiler(tmp_path_factory.mktemp("tpu"))
    except CompilerMissingError as error:
        if os.environ.get("HEX_LLM_REQUIRE_ORACLE") == "1":
            pytest.fail(f"HEX_LLM_REQUIRE_ORACLE=1, but {error}")
        pytest.skip(f"no TPU compiler: {error}")
    yield compiler
    compiler.close()
