"""What nobody may use: whatever can run code that came as data, and clocks that can be set, where time is measured.

No list has exceptions but that of clocks, whose exceptions say why.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.suite import record
from tests.test_architecture import FILES, PROJECT, calls, imports, name_of

FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "diskcache"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
# By the last of their names, whatever they are reached by: yaml.load reads objects, safe_load does not.
FORBIDDEN_METHODS = {"literal_eval", "unsafe_load", "full_load", "yaml.load", "torch.load", "jsonpickle.decode"}

ALL_FILES = sorted(
    path
    for folder in ("hex_llm", "tests", "benchmarks", "training", "examples", "notebooks", "scripts")
    for path in (PROJECT / folder).rglob("*.py")
)
# Where what is asked for is the time of day, and nothing waits for it.
CLOCKS = {
    "hex_llm/server/chat.py": "created, a field of answers",
    "hex_llm/server/completions.py": "created, a field of answers",
    "hex_llm/server/vertex.py": "created, a field of answers",
    "hex_llm/server/state.py": "created, a field of /v1/models",
    "hex_llm/text/template.py": "strftime_now, which templates write the date with",
    "hex_llm/download/site.py": "Retry-After as a date; the wait for it is bounded by the monotonic clock",
    "hex_llm/transfer/offers.py": "JAX's transfer server takes a moment of the day; who waits asks the monotonic clock",
}
OF_DAY = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "time.localtime",
          "time.gmtime", "date.today"}  # fmt: skip


def test_files_are_found():
    assert set(FILES) < set(ALL_FILES)


def run_as_code(path: Path) -> Iterator[str]:
    for name in imports(path):
        if {*name.split(".")} & FORBIDDEN:
            yield f"imports {name}"
    for call in calls(path):
        called = ast.unparse(call.func)
        if isinstance(call.func, ast.Name) and called in FORBIDDEN_CALLS:
            yield f"calls {called}"
        if any(called == name or called.endswith(f".{name}") for name in FORBIDDEN_METHODS):
            yield f"calls {called}"
        for keyword in call.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg == "allow_pickle" and not is_off:
                yield "allows pickle"


def test_no_data_is_run_as_code():
    found = [f"{name_of(path)} {what}" for path in ALL_FILES for what in run_as_code(path)]
    assert found == []
    record("F21", f"none of {len(ALL_FILES)} files imports pickle or its kin, or calls eval, exec or the like")


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from a import dill",
        "eval(x)",
        "ast.literal_eval(x)",
        "yaml.load(f)",
        "np.load(f, allow_pickle=x)",
    ],
)
def test_what_is_forbidden_is_found(code, tmp_path):
    (tmp_path / "file.py").write_text(code)
    assert [*run_as_code(tmp_path / "file.py")]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_package_never_trusts_remote_code_and_needs_no_torch(path):
    for name in imports(path):
        assert name.split(".")[0] != "torch", f"{name_of(path)} imports {name}"
    for call in calls(path):
        for keyword in call.keywords:
            allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            assert keyword.arg != "trust_remote_code" or allowed, f"{name_of(path)}:{call.lineno} trusts remote code"


def asks_for_the_day(path: Path) -> bool:
    called = [ast.unparse(call.func) for call in calls(path)]
    named = [each for each in imports(path) if each in OF_DAY]
    return bool(named) or any(name == each or name.endswith(f".{each}") for name in called for each in OF_DAY)


def test_time_is_measured_by_a_clock_that_nobody_can_set():
    found = {name_of(path) for path in FILES if asks_for_the_day(path)}
    assert found == {*CLOCKS}
    record("F35", f"{len(FILES) - len(CLOCKS)} of {len(FILES)} files never ask for the time of day; the other"
                  f" {len(CLOCKS)} write it down, and wait for nothing by it")  # fmt: skip
