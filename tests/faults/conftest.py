import pytest

from tests.server.servers import checked


@pytest.fixture(autouse=True, scope="session")
def _checked():
    """Engines of the suite look at each rest whether they have lost anything."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in checked().items():
            patch.setenv(name, value)
        yield
