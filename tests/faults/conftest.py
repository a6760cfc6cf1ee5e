from pathlib import Path

import pytest

from tests.checkpoints import write_llama
from tests.server.servers import checked


@pytest.fixture(autouse=True, scope="session")
def _checked():
    """Engines of the suite look at each rest whether they have lost anything."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in checked().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model."""
    return write_llama(tmp_path_factory.mktemp("model"))
