import shutil
from pathlib import Path

import pytest

from hex_llm.download import fetch, ranges
from hex_llm.download.cloud_storage import BucketSource
from hex_llm.download.hub import HubSettings, HubSource
from hex_llm.download.reference import InBucket, OnHub
from tests.checkpoints import write_llama
from tests.download.fixtures import running, stand_in

__all__ = ["running", "stand_in"]  # fixtures


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch):
    monkeypatch.setattr(ranges, "RANGE", 64 * 2**10)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A model of about 400 kB in two files, so with several ranges, and with files that nobody wants."""
    folder = write_llama(tmp_path_factory.mktemp("made") / "model", num_files=2)
    for name in ("pytorch_model.bin", "modeling.py", "consolidated.safetensors", "README.md"):
        (folder / name).write_bytes(b"unwanted")
    return folder


@pytest.fixture(params=["hub", "bucket"])
def source(request, stand_in, model, tmp_path):
    """The model, wherever it lies, and a cache of its own."""
    name = f"of-{tmp_path.name}"
    if request.param == "hub":
        shutil.copytree(model, stand_in.hub(f"test/{name}"), dirs_exist_ok=True)
        return HubSource(OnHub(f"test/{name}"), HubSettings(stand_in.url, tmp_path / "cache", None, False))
    shutil.copytree(model, stand_in.bucket(f"models/{name}"), dirs_exist_ok=True)
    return BucketSource(InBucket("models", name), tmp_path / "cache")


@pytest.fixture
def no_room(monkeypatch):
    """Has every disk be as small as it is told."""
    return lambda free: monkeypatch.setattr(fetch, "free_bytes", lambda folder: free)
