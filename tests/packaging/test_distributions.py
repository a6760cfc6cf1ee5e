"""The wheel and the sdist: built, looked into, installed elsewhere, and served from."""

import email.parser
import email.policy
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import hex_llm
from tests.server.servers import running_server

ROOT = Path(__file__).parents[2]
PARIS = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


@dataclass(frozen=True)
class Built:
    """What was built from a copy of the tree: an sdist, a wheel from it, and a wheel from the tree itself."""

    sdist: Path
    wheel: Path
    direct_wheel: Path
    log: str


def tracked() -> list[str]:
    """The files of the repository, those that are not committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in listed if (ROOT / path).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    for path in tracked():
        (folder / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / "source" / path)
    log = build(folder / "source", folder / "dist") + build(folder / "source", folder / "direct", "--wheel")
    ((sdist,), (wheel,)) = ((folder / "dist").glob(pattern) for pattern in ("*.tar.gz", "*.whl"))
    (direct_wheel,) = (folder / "direct").glob("*.whl")
    return Built(sdist, wheel, direct_wheel, log)


def build(source: Path, out: Path, *flags: str) -> str:
    # By the setuptools that is here: to fetch one would take a registry.
    command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={out}", *flags, str(source)]
    done = subprocess.run(
        command, env=without_checkout(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def without_checkout() -> dict[str, str]:
    """The environment of somebody who has not set ours."""
    ours = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    return {name: value for name, value in os.environ.items() if name not in ours}


def files_of_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return set(archive.namelist())


def test_nothing_warns_while_they_are_built(built):
    assert [line for line in built.log.splitlines() if re.search("warn|deprecat", line, re.IGNORECASE)] == []


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    package = {path for path in tracked() if path.startswith("hex_llm/")}
    assert {"hex_llm/py.typed", "hex_llm/server/playground/index.html"} < package
    about = f"hex_llm-{hex_llm.__version__}.dist-info/"
    names = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    assert files_of_wheel(built.wheel) == package | {about + name for name in names}
    assert built.wheel.stat().st_size < 20e6  # of which the small model is most; a registry takes 100 MB


def test_the_sdist_has_what_makes_the_wheel_and_what_changed(built):
    with tarfile.open(built.sdist) as archive:
        members = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    package = {path for path in tracked() if path.startswith("hex_llm/")}
    made = {name for name in members if name.startswith("hex_llm.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    around = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
    assert set(members) == package | made | around


def test_the_sdist_makes_the_wheel_that_the_tree_makes(built):
    assert files_of_wheel(built.wheel) == files_of_wheel(built.direct_wheel)


def test_the_metadata_say_whose_it_is_and_have_the_readme(built):
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = email.parser.BytesParser(policy=email.policy.compat32).parsebytes(archive.read(name))
    assert (metadata["Name"], metadata["Version"]) == ("hex-llm", hex_llm.__version__)
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    assert "Programming Language :: Python :: 3.12" in metadata.get_all("Classifier", [])


def environment(folder: Path) -> Path:
    """A new environment's folder of commands."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, env=without_checkout())
    return folder / "bin"


def install(commands: Path, wheel: Path, *flags: str) -> None:
    command = [commands / "python", "-m", "pip", "install", "-q", *flags, wheel]
    subprocess.run(command, cwd=commands.parent, env=without_checkout(), check=True)


def check_it_works(commands: Path, log: Path) -> None:
    """From a folder that is not the checkout's, which Python would look into first."""

    def said(*argv: str | Path) -> str:
        return subprocess.run(
            argv, cwd=commands.parent, env=without_checkout(), capture_output=True, text=True, check=True, timeout=120
        ).stdout

    where = said(commands / "python", "-c", "import hex_llm; print(hex_llm.__file__)")
    assert Path(where.strip()).is_relative_to(commands.parent)
    assert said(commands / "hex-llm", "version") == f"hex-llm {hex_llm.__version__}\n"
    assert "meta-llama/Llama-3.1-8B-Instruct" in said(commands / "hex-llm", "models", "llama")
    serve = (str(commands / "hex-llm"), "serve")
    with running_server(None, log, command=serve, start_in=commands.parent, PYTHONPATH="") as server:
        answer = server.post("/v1/chat/completions", PARIS).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert "playground" in server.get("/").text
        engine = Path(f"/proc/{server.engine_pid}")
        assert (engine / "cwd").readlink() == commands.parent
        assert str(commands).encode() in (engine / "cmdline").read_bytes()


def test_the_installed_wheel_serves(built, tmp_path):
    """Its requirements are those of this environment."""
    commands = environment(tmp_path / "venv")
    install(commands, built.wheel, "--no-index", "--no-deps", "--no-compile")
    (packages,) = (tmp_path / "venv").glob("lib/*/site-packages")
    # A .pth file in a folder that another .pth names is not read: the editable install of the checkout stays out.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    check_it_works(commands, tmp_path / "log")


@pytest.mark.slow
def test_the_wheel_with_its_own_requirements_serves(built, tmp_path):
    commands = environment(tmp_path / "venv")
    install(commands, built.wheel, "-c", str(ROOT / "constraints.txt"))
    assert not list((tmp_path / "venv").glob("lib/*/site-packages/pytest"))
    check_it_works(commands, tmp_path / "log")
