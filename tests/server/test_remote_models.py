"""Servers whose models are on a hub or in a bucket: stand-ins of both, in a process of their own."""

import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.checkpoints import write_llama
from tests.download.servers import running_stand_in
from tests.server.servers import free_port, running_server

PROMPT = {"prompt": "hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    with running_stand_in(tmp_path_factory.mktemp("stand_in")) as running:
        write_llama(running.hub("test/model"), num_files=2)
        shutil.copytree(running.hub("test/model"), running.bucket("models/path/of-one"), dirs_exist_ok=True)
        yield running


@pytest.fixture(scope="module")
def local_answer(stand_in, tmp_path_factory) -> str:
    """What the same model says from a folder."""
    log = tmp_path_factory.mktemp("local") / "log"
    with running_server(stand_in.hub("test/model"), log) as server:
        return server.post("/v1/completions", PROMPT).json()["choices"][0]["text"]


def answer(server) -> str:
    response = server.post("/v1/completions", PROMPT)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_a_model_of_the_hub_is_served_under_its_id(stand_in, local_answer, tmp_path):
    with running_server(None, tmp_path / "log", "--model=test/model", **stand_in.environment) as server:
        assert answer(server) == local_answer
        assert server.get("/v1/models").json()["data"][0]["id"] == "test/model"
    assert "Downloaded 0." in (tmp_path / "log").read_text()
    before = len(stand_in.asked_for("safetensors"))
    offline = stand_in.environment | {"HF_HUB_OFFLINE": "1"}
    with running_server(None, tmp_path / "log", "--model=test/model", **offline) as server:
        assert answer(server) == local_answer
    assert len(stand_in.asked_for("safetensors")) == before


def test_vertex_names_a_bucket_and_several_engines_and_fronts_download_once(stand_in, local_answer, tmp_path):
    flags = (f"--download_dir={tmp_path / 'models'}", "--data_parallel_size=2", "--api_server_count=2")
    devices = {"JAX_NUM_CPU_DEVICES": "2", "NPROC": "40", "PJRT_NPROC": "40"}
    environment = stand_in.environment | devices | {"AIP_STORAGE_URI": "gs://models/path/of-one"}
    with running_server(None, tmp_path / "log", *flags, **environment) as server:
        assert answer(server) == local_answer
    asked = [each["path"] for each in stand_in.asked_for("-of-00002.safetensors") if "/o/" in each["path"]]
    assert len(asked) == len(set(asked)) == 2
    assert list((tmp_path / "models").glob("gs--models--*/snapshots/*/config.json"))


def test_the_tokenizer_may_come_from_elsewhere(stand_in, local_answer, tmp_path):
    flags = (f"--model={stand_in.hub('test/model')}", "--tokenizer=gs://models/path/of-one")
    with running_server(None, tmp_path / "log", *flags, **stand_in.environment) as server:
        assert answer(server) == local_answer


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--model=test/nothing"], 6, ["test/nothing: ", "answers 404 (Repository not found)", "Nor is there a"]),
        (["--model=gs://private-bucket/x"], 6, ["gs://private-bucket/x: ", "answers 403 (Anonymous caller"]),
        (["--tokenizer=test/nothing"], 6, ["test/nothing: ", "answers 404"]),
    ],
)
def test_what_cannot_be_had_is_told_in_one_line_and_soon(flags, code, words, stand_in, monkeypatch):
    for name, value in stand_in.environment.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "hex_llm.server.api_server", "--host=127.0.0.1", f"--port={free_port()}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("hex-llm: ")]
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_a_server_that_is_told_to_stop_does_not_wait_for_a_download(stand_in, tmp_path):
    write_llama(stand_in.hub("test/slow"))
    stand_in.set_faults({"match": "cdn/test/slow/model", "stall": 60, "cut": 0.5, "times": 100})
    with running_server(None, tmp_path / "log", "--model=test/slow", ready=False, **stand_in.environment) as server:
        deadline = time.monotonic() + 60
        while not stand_in.asked_for("cdn/test/slow/model"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        said = server.get("/ping")
        assert said.status_code == 503
        assert "downloading the model" in said.text
        server.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert server.process.wait(30) == 0
        assert time.monotonic() - started < 8
    stand_in.set_faults()
    (folder,) = (stand_in.root / "home" / "hub" / "models--test--slow" / "snapshots").iterdir()
    assert not list(folder.glob("*.safetensors"))
