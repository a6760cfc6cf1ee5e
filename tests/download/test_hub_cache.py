"""The hub's cache is shared with its own tools; what is in it is used without the hub."""

import os
import shutil
import subprocess
import sys

import pytest

from hex_llm.download.fetch import fetch
from hex_llm.download.hub import HubSettings, HubSource
from hex_llm.download.reference import OnHub
from hex_llm.download.wanted import MODEL, TEXT
from hex_llm.errors import DownloadError
from tests.download.stand_in import COMMIT
from tests.download.test_fetch import INDEX, SMALL, WEIGHTS, names, same

SNAPSHOT = "import sys, huggingface_hub as hub; print(hub.snapshot_download(sys.argv[1], local_files_only={}))"


@pytest.fixture
def reference(stand_in, model, tmp_path) -> OnHub:
    shutil.copytree(model, stand_in.hub(f"test/{tmp_path.name}"), dirs_exist_ok=True)
    return OnHub(f"test/{tmp_path.name}")


def settings(stand_in, tmp_path, *, offline=False, endpoint=None):
    return HubSettings(endpoint or stand_in.url, tmp_path / "home" / "hub", None, offline)


def snapshot(stand_in, reference, tmp_path, *, local: bool) -> str:
    """As huggingface_hub has it, in another process."""
    environment = os.environ | stand_in.environment | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", SNAPSHOT.format(local), reference.id]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_what_we_download_other_tools_find(stand_in, reference, tmp_path):
    folder = fetch(HubSource(reference, settings(stand_in, tmp_path)), MODEL, timeout_s=5)
    assert snapshot(stand_in, reference, tmp_path, local=True) == str(folder)


def test_what_other_tools_download_we_find(stand_in, reference, model, tmp_path):
    folder = snapshot(stand_in, reference, tmp_path, local=False)
    before = len(stand_in.log())
    assert str(fetch(HubSource(reference, settings(stand_in, tmp_path)), MODEL, timeout_s=5)) == folder
    assert len(stand_in.log()) == before + 1
    assert str(fetch(HubSource(reference, settings(stand_in, tmp_path, offline=True)), MODEL, timeout_s=5)) == folder
    assert len(stand_in.log()) == before + 1


def test_the_environment_is_huggingface_hubs(tmp_path):
    code = (
        "from hex_llm.download.hub import HubSettings\n"
        "from pathlib import Path\n"
        "print(HubSettings.of_environment(None), HubSettings.of_environment(Path('/x')).cache)"
    )
    given = {"HF_HOME": "/home/of/hf", "HF_ENDPOINT": "http://hub/", "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "1"}
    said = subprocess.check_output([sys.executable, "-c", code], env=os.environ | given, text=True)
    assert "endpoint='http://hub', cache=PosixPath('/home/of/hf/hub'), token='hf_x', offline=True) /x" in said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"HF_ENDPOINT": "hub.example"}, "HF_ENDPOINT=hub.example is no address"),
        ({"HF_ENDPOINT": ""}, "HF_ENDPOINT= is no address"),
        ({"HF_TOKEN": "hf_\x01secret"}, "The token for the hub has a character"),
        ({"HF_TOKEN": "hf_\xe9secret"}, "The token for the hub has a character"),
    ],
)
def test_what_can_be_no_address_and_no_token_is_refused(given, words):
    code = "from hex_llm.download.hub import HubSettings; HubSettings.of_environment(None)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | given, capture_output=True, text=True, check=False
    )
    assert f"ConfigError: {words}" in done.stderr
    assert "secret" not in done.stderr


def test_offline_what_was_never_downloaded_is_refused_without_asking(stand_in, reference, tmp_path):
    source = HubSource(reference, settings(stand_in, tmp_path, offline=True))
    before = len(stand_in.log())
    with pytest.raises(DownloadError, match=rf"{reference.id} was never downloaded. HF_HUB_OFFLINE forbids"):
        fetch(source, MODEL, timeout_s=5)
    fetch(HubSource(reference, settings(stand_in, tmp_path)), TEXT, timeout_s=5)
    with pytest.raises(DownloadError, match=r"holds no \*.safetensors file. HF_HUB_OFFLINE forbids"):
        fetch(source, MODEL, timeout_s=5)
    assert names(fetch(source, TEXT, timeout_s=5)) == SMALL
    assert not any("safetensors" in each["path"] for each in stand_in.log()[before:])


def test_a_hub_that_cannot_be_reached_is_done_without(stand_in, reference, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hex_llm.download.fetch._ASK_S", 0.1)
    folder = fetch(HubSource(reference, settings(stand_in, tmp_path)), MODEL, timeout_s=5)
    nobody = settings(stand_in, tmp_path, endpoint="http://127.0.0.1:9")
    assert fetch(HubSource(reference, nobody), MODEL, timeout_s=5) == folder
    assert "What is here from before is taken" in caplog.text
    with pytest.raises(DownloadError, match=r"the connection to .* failed"):
        fetch(HubSource(OnHub("test/another"), nobody), MODEL, timeout_s=0.1)


def test_a_commit_is_pinned(stand_in, reference, model, tmp_path):
    pinned = HubSource(OnHub(reference.id, COMMIT), settings(stand_in, tmp_path))
    folder = fetch(pinned, MODEL, timeout_s=5)
    assert folder.name == COMMIT
    assert names(folder) == SMALL | INDEX | WEIGHTS
    assert same(folder, model)
    assert not (folder.parents[1] / "refs").exists()
    offline = HubSource(OnHub(reference.id, COMMIT), settings(stand_in, tmp_path, offline=True))
    assert fetch(offline, MODEL, timeout_s=5) == folder
    branch = HubSource(reference, settings(stand_in, tmp_path, offline=True))
    with pytest.raises(DownloadError, match="was never downloaded"):
        fetch(branch, MODEL, timeout_s=5)
