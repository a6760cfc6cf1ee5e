"""Servers whose models are on a hub or in a bucket: stand-ins of both, in a process of their own."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hex_llm import faults
from tests.checkpoints import write_llama
from tests.download.servers import running_emulator, running_stand_in
from tests.download.stand_in import TOKEN
from tests.faults.oracles import check_oracles
from tests.faults.suite import record
from tests.server.servers import free_port, running_server

SHARD = "model-00002-of-00002.safetensors"
PROMPT = {"prompt": "hello", "max_tokens": 8, "temperature": 0}


@pytest.fixture(autouse=True)
def no_faults(stand_in):
    yield
    stand_in.set_faults()


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
    log = (tmp_path / "log").read_text()
    assert log.count("There is no folder test/model here: it is asked of the Hugging Face Hub.") == 1
    assert "Downloaded 0." in log
    before = len(stand_in.asked_for("safetensors"))
    offline = stand_in.environment | {"HF_HUB_OFFLINE": "1"}
    with running_server(None, tmp_path / "log", "--model=test/model", **offline) as server:
        assert answer(server) == local_answer
    assert len(stand_in.asked_for("safetensors")) == before


def test_a_private_model_is_served_to_whoever_has_the_token(stand_in, local_answer, tmp_path):
    shutil.copytree(stand_in.hub("test/model"), stand_in.hub("test/private"), dirs_exist_ok=True)
    environment = stand_in.environment | {"HF_TOKEN": TOKEN, "HEXLLM_API_KEYS": "of-the-server"}
    with running_server(None, tmp_path / "log", "--model=test/private", keys=["one"], **environment) as server:
        assert answer(server) == local_answer
        engine = Path(f"/proc/{server.engine_pid}/environ").read_bytes()
        assert b"HEXLLM_API_KEYS" not in engine
    assert TOKEN not in (tmp_path / "log").read_text()


def test_a_model_in_a_real_emulator_of_cloud_storage_is_served(stand_in, local_answer, tmp_path):
    with running_emulator("bucket", stand_in.hub("test/model"), "some/path/") as url:
        environment = {"STORAGE_EMULATOR_HOST": url, "XDG_CACHE_HOME": str(tmp_path)}
        with running_server(None, tmp_path / "log", "--model=gs://bucket/some/path", **environment) as server:
            assert answer(server) == local_answer


@pytest.mark.parametrize("model", ["test/model", "gs://models/path/of-one"])
def test_a_source_that_fails_on_purpose_is_asked_again(model, stand_in, local_answer, tmp_path):
    """F25: in the HTTP process, which has the tokenizer's files, and in the engine, which has the rest."""
    environment = stand_in.environment | {"HF_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment[faults.VARIABLE] = "source.open:503@2-4,source.write:flip@1"
    with running_server(None, tmp_path / "log", f"--model={model}", **environment) as server:
        assert answer(server) == local_answer
        check_oracles(server)
    assert f"answers 503, for {faults.VARIABLE} wants it to" in (log := (tmp_path / "log").read_text())
    assert "came damaged, and is downloaded once more" in log
    record("F25", f"{model.partition('/')[0].rstrip(':')}: a server whose downloads failed and came damaged is ready")


def test_vertex_names_a_bucket_and_several_engines_and_fronts_download_once(stand_in, local_answer, tmp_path):
    flags = (f"--download_dir={tmp_path / 'models'}", "--data_parallel_size=2", "--api_server_count=2")
    devices = {"JAX_NUM_CPU_DEVICES": "2", "NPROC": "40", "PJRT_NPROC": "40"}
    environment = stand_in.environment | devices | {"AIP_STORAGE_URI": "gs://models/path/of-one"}
    before = len(stand_in.asked_for("-of-00002.safetensors"))
    with running_server(None, tmp_path / "log", *flags, **environment) as server:
        assert answer(server) == local_answer
    asked = [each["path"] for each in stand_in.asked_for("-of-00002.safetensors")[before:] if "/o/" in each["path"]]
    assert len(asked) == len(set(asked)) == 2
    assert list((tmp_path / "models").glob("gs--models--*/snapshots/*/config.json"))


def test_the_tokenizer_may_come_from_elsewhere(stand_in, local_answer, tmp_path):
    flags = (f"--model={stand_in.hub('test/model')}", "--tokenizer=gs://models/path/of-one")
    with running_server(None, tmp_path / "log", *flags, **stand_in.environment) as server:
        assert answer(server) == local_answer


def refusal(*flags, **environment) -> str:
    """The one line that a server ends with which cannot have its model."""
    command = [sys.executable, "-m", "hex_llm.server.api_server", "--host=127.0.0.1", f"--port={free_port()}", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | environment
    )
    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("hex-llm: "))
    return line


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--model=test/nothing", ["test/nothing: ", "answers 404 (Repository not found)", "Nor is there a"]),
        ("--model=test/gated", ["test/gated/", "answers 403 (Access to model", "HF_TOKEN may be needed"]),
        ("--model=gs://private-bucket/x", ["gs://private-bucket/x: ", "answers 403 (Anonymous caller"]),
        ("--model=gs://models/nothing", ["gs://models/nothing has no files"]),
        ("--tokenizer=test/nothing", ["test/nothing: ", "answers 404"]),
    ],
)
def test_what_cannot_be_had_is_told_in_one_line_before_anything_heavy_is_imported(flag, words, stand_in, tmp_path):
    """So within 5 s, most of which the engine takes to import JAX: here it never has."""
    write_llama(stand_in.hub("test/gated"))
    (tmp_path / "jax.py").write_text("import time\ntime.sleep(3600)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    line = refusal(flag, **stand_in.environment, PYTHONPATH=path)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("flag", "fault", "words"),
    [
        ("--model=test/model", {"status": 404}, "answers 404"),
        ("--model=gs://models/path/of-one", {"flip": True}, "came damaged twice"),
        ("--model=gs://models/path/of-one", {"stall": 30, "cut": 0.5}, "given up after 2 s without a byte"),
    ],
)
def test_weights_that_cannot_be_had_end_the_start(flag, fault, words, stand_in, tmp_path):
    stand_in.set_faults({"match": SHARD, "times": 1000} | fault)
    flags = (flag, "--download_timeout_s=2", f"--download_dir={tmp_path}")
    line = refusal(*flags, **stand_in.environment)
    assert f"/{SHARD}" in line
    assert words in line
    assert not list(tmp_path.rglob(SHARD))
    record("F25", f'a whole server, "{words}": exit 6, no file')


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
    (folder,) = (stand_in.root / "home" / "hub" / "models--test--slow" / "snapshots").iterdir()
    assert not list(folder.glob("*.safetensors"))
