"""The image: what the Dockerfile says, and its steps run here, each in a folder of its own in place of a container."""

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from hex_llm.config import Config
from hex_llm.deploy.deployment import COMMAND
from tests.deploy.dockerfile import stages, variables, words

ROOT = Path(__file__).parents[2]
BUILD, FINAL = stages(ROOT / "docker" / "Dockerfile")
COPIED = [word for line in BUILD.all("COPY") for word in line.split()[:-1]]


def tracked(path: str) -> list[str]:
    command = ["git", "ls-files", "--", path]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_image_runs_the_server_as_a_user_who_is_not_root():
    assert tuple(words(FINAL.one("ENTRYPOINT"))) == COMMAND
    user, group = FINAL.one("USER").split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert f"--uid {user} " in FINAL.all("RUN")[0]
    assert FINAL.one("EXPOSE") == str(Config().port)
    assert not FINAL.all("CMD")
    last = FINAL.instructions.index(("USER", f"{user}:{group}"))
    assert all(word not in ("RUN", "COPY") for word, _ in FINAL.instructions[last:])


def test_the_last_stage_has_the_environment_and_no_compiler():
    assert FINAL.base == "python:${PYTHON}-slim"
    assert FINAL.one("COPY") == "--from=build /opt/hex-llm /opt/hex-llm"
    installers = ("apt", "pip", "uv ", "gcc", "build-essential", "conda")
    assert not [step for step in FINAL.all("RUN") if any(word in step for word in installers)]
    assert variables(FINAL.all("ENV"))["PATH"] == "/opt/hex-llm/bin:$PATH"


def test_what_is_copied_is_there_and_nothing_else_is_sent_to_the_builder():
    assert COPIED == ["pyproject.toml", "constraints.txt", "README.md", "LICENSE", "hex_llm"]
    assert all(tracked(path) for path in COPIED)
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines == ["*", *(f"!{path}" for path in COPIED), "**/__pycache__"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder that the steps of the first stage have made, in place of /opt/hex-llm."""
    folder = tmp_path_factory.mktemp("image")
    source = folder / "src"
    for path in (each for each in COPIED for each in tracked(each)):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, source / path)
    subprocess.run([sys.executable, "-m", "venv", folder / "python"], check=True)
    for step in BUILD.all("RUN"):
        done = run_step(step, folder)
        assert done.returncode == 0, done.stderr
    return folder / "opt"


def run_step(step: str, folder: Path, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    # To compile all bytecode is for the image; here it would only take time.
    settings = variables(BUILD.all("ENV")) | {"UV_COMPILE_BYTECODE": "0", "DEVICE": device}
    environment = os.environ | settings | {"PATH": f"{folder / 'python' / 'bin'}:{os.environ['PATH']}"}
    command = ["sh", "-c", step.replace("/opt/hex-llm", str(folder / "opt"))]
    return subprocess.run(
        command, cwd=folder / "src", env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def in_image(built: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{built / 'bin'}:/usr/bin:/bin", "HOME": str(built.parent)}
    return subprocess.run(
        argv, cwd=built.parent, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_steps_make_an_environment_in_which_the_entry_command_runs(built):
    done = in_image(built, *words(FINAL.one("ENTRYPOINT")), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: hex-llm serve")
    code = "import hex_llm, ray, google.auth, pathlib; print(hex_llm.__file__)"
    done = in_image(built, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(built)
    assert in_image(built, "python", "-c", "import pytest").returncode == 1
    model = "import hex_llm, pathlib; print(*(pathlib.Path(hex_llm.__file__).parent / 'assets').rglob('*.safetensors'))"
    assert "hex-mini" in in_image(built, "python", "-c", model).stdout


@pytest.mark.slow
def test_the_entry_command_serves_and_becomes_healthy(built):
    """With the small model, which is in the image; as Docker does it, but for the container."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    path = f"{built / 'bin'}:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(built.parent), "JAX_PLATFORMS": "cpu", "HEALTH_PORT": port}
    command = [*words(FINAL.one("ENTRYPOINT")), "--host=127.0.0.1", f"--port={port}"]
    with subprocess.Popen(command, cwd=built.parent, env=environment) as server:
        healthy = False
        deadline = time.monotonic() + 300
        while not healthy and server.poll() is None and time.monotonic() < deadline:
            time.sleep(1)
            check = words(FINAL.one("HEALTHCHECK"))
            healthy = not subprocess.run(check, env=environment, capture_output=True, check=False).returncode
        server.terminate()
        assert server.wait(60) == 0
    assert healthy


def test_another_device_is_refused(built):
    done = run_step(BUILD.all("RUN")[-1], built.parent, device="abacus")
    assert (done.returncode, done.stderr) == (2, "DEVICE=abacus is not one of tpu, cuda, cpu.\n")


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_the_packages_for_a_device_can_be_had_together(device, built):
    step = BUILD.all("RUN")[-1].replace("uv pip install", "uv pip install --dry-run").replace("uv venv", ": uv venv")
    done = run_step(step, built.parent, device)
    assert done.returncode == 0, done.stderr
    assert {"tpu": "libtpu==", "cuda": "jax-cuda13-plugin=="}[device] in done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("useradd"), reason="to add a user takes root")
def test_the_user_is_made_with_a_home_that_has_a_folder_for_caches(tmp_path):
    (step,) = FINAL.all("RUN")
    (tmp_path / "etc").mkdir()
    for name in ("passwd", "group", "shadow", "gshadow"):
        (tmp_path / "etc" / name).touch()
    (tmp_path / "home").mkdir()
    here = step.replace("useradd ", f"useradd --prefix {tmp_path} ").replace("/home/", f"{tmp_path}/home/")
    subprocess.run(["sh", "-c", here], check=True, capture_output=True)
    assert (tmp_path / "etc" / "passwd").read_text().startswith("hexllm:x:1000:1000:")
    assert (tmp_path / "home" / "hexllm" / ".cache").stat().st_uid == 1000


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_asks_ping(status, code):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        check = words(FINAL.one("HEALTHCHECK"))
        environment = os.environ | {"HEALTH_PORT": str(server.server_port)}
        command = [sys.executable, *check[1:]]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=30, check=False)
        server.shutdown()
    assert check[0] == "python"
    assert (done.returncode, asked) == (code, ["/ping"])


def test_nobody_listening_is_unhealthy():
    command = [sys.executable, *words(FINAL.one("HEALTHCHECK"))[1:]]
    environment = os.environ | {"HEALTH_PORT": "9"}
    assert subprocess.run(command, env=environment, capture_output=True, timeout=30, check=False).returncode == 1


def test_compose_builds_the_image_for_each_device():
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    assert set(compose["services"]) == {"cpu", "cuda", "tpu"}
    for device, service in compose["services"].items():
        assert service["profiles"] == [device]
        assert service["build"]["args"] == {"DEVICE": device}
        assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["shm_size"] == "16gb"
        assert int(service["stop_grace_period"].removesuffix("s")) > Config().drain_timeout_s
        assert service["environment"]["HF_TOKEN"] is None  # taken from whoever starts it, where it is set
        assert "entrypoint" not in service
        assert service["volumes"] == ["cache:/home/hexllm/.cache"]
        assert service.get("network_mode") == "host" or service["ports"] == ["${PORT:-7080}:7080"]
    assert compose["volumes"] == {"cache": None}
