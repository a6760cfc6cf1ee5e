"""The stand-in for tests, which conftests of several folders take from here."""

import pytest
from huggingface_hub import constants

from hex_llm.download import patience
from tests.download.servers import RunningStandIn, running_stand_in


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    with running_stand_in(tmp_path_factory.mktemp("stand_in")) as stand_in:
        yield stand_in


@pytest.fixture
def stand_in(running, monkeypatch) -> RunningStandIn:
    """Takes the place of the hub and of Cloud Storage, with no faults yet; clients have little patience."""
    running.set_faults()
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.url)
    monkeypatch.setattr(constants, "ENDPOINT", running.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return running
