"""The architecture: who may import whom. What nobody may use is in tests/faults/test_forbidden.py."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
ROOT = PROJECT / "hex_llm"

# Imports point down this list, and never sideways along a line of it.
RANKS = """
cli
server bench chat_cli deploy models_cli plan_cli
llm engine_process
follower
build
transfer
runner
lora
loader
models
layers
quantization
kernels
parallel
completion
engine
text
source launch planning
peer
catalog config command channel download safetensors_file
frames
faults flags log model_fields model_files module_names process topology progress
errors pytree seal version
"""
RANK = {name: rank for rank, line in enumerate(RANKS.split("\n")) for name in line.split()}
NO_JAX = {
    "cli", "deploy", "models_cli", "plan_cli", "server", "completion", "engine", "text", "source", "planning",
    "catalog", "config", "flags", "log", "model_fields", "model_files", "module_names", "frames", "process", "command",
    "errors", "faults", "launch", "peer", "channel", "seal", "topology", "download", "progress", "lora",
    "safetensors_file", "version",
}  # fmt: skip

FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PROJECT))


def package(path: Path) -> str:
    """The package or module directly under hex_llm that a file belongs to; empty for hex_llm itself."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, at its top or inside its functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name_of(path)} imports relative to itself"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(path: Path) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def test_files_are_found():
    assert len(FILES) > 10


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path):
    own = package(path)
    if not own:
        return
    assert own in RANK, f"{own} has no rank: give it one in RANKS"
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "hex_llm" and rest[0] != own:
            assert rest[0] in RANK, f"{name_of(path)} imports {name}, which is no ranked part of hex_llm"
            assert RANK[rest[0]] > RANK[own], f"{own} imports {rest[0]}, which is not below it"


@pytest.mark.parametrize("path", [path for path in FILES if package(path) in NO_JAX], ids=name_of)
def test_the_host_side_imports_no_jax(path):
    for name in imports(path):
        top, *rest = name.split(".")
        assert top not in {"jax", "jaxlib"}, f"{name_of(path)} imports {name}"
        if top == "hex_llm":
            assert rest[0] in NO_JAX, f"{name_of(path)} imports {name}, which imports jax"


def test_the_host_side_runs_without_jax():
    modules = [
        ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if package(path) in NO_JAX
    ]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'jax' in sys.modules: sys.exit(f'{name} brings in jax')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_modules_are_imported_by_name_only_where_commands_and_public_names_are(path):
    dynamic = [call for call in calls(path) if ast.unparse(call.func).endswith("import_module")]
    assert not dynamic or package(path) in ("cli", ""), f"{name_of(path)}:{dynamic[0].lineno}"
