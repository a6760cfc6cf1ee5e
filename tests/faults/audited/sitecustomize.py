"""Python runs this when it starts, where the folder is on its path: it then writes down whatever is done that a model's
files must never lead to (docs/reliability.md has the list). HEX_LLM_AUDIT names the folder of the model and the file to
write to, with a colon between.
"""
# What is called for everything that Python does makes no objects of paths.
# ruff: noqa: PTH100, PTH109, PTH118, PTH120

import os
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any

_MODEL, _LOG = os.environ["HEX_LLM_AUDIT"].split(":")
_TRAP = "sprung by a trap"  # is in all code that lies in the model's folder, and nowhere else
_CODE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".py", ".pyc", ".so")
# What may be run: what is installed, the standard library, and this file.
_PACKAGE = os.path.join(os.getcwd(), "hex_llm")
_TRUSTED = tuple(
    os.path.realpath(path) + os.sep
    for path in (*sysconfig.get_paths().values(), sys.base_prefix, _PACKAGE, os.path.dirname(__file__))
)


def _trusted(path: str) -> bool:
    return path.startswith("<frozen ") or os.path.realpath(path).startswith(_TRUSTED)


def _note(kind: str, what: object) -> None:
    who = " ".join(" ".join(sys.orig_argv[1:4]).split())
    line = f"{kind}\t{who}\t{what}\n".encode(errors="replace")
    file = os.open(_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line)
    os.close(file)


def _caller() -> str:
    """The file of the code that has caused an event. To ask for a frame is an event too, so that few do."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return "<frozen start>" if frame is None else frame.f_code.co_filename


def _runs(code: Any) -> str | None:
    name = getattr(code, "co_filename", "")
    # Made by a program, as dataclasses and templates are: then the program must be one that may run.
    if name.startswith("<") or not name:
        return None if _trusted(maker := _caller()) or maker.startswith("<") else f"code made by {maker} is run"
    return None if _trusted(name) else f"code of {name} is run"


def _loads() -> str | None:
    """Bytes are read as code by imports, and by nobody else."""
    return None if (caller := _caller()).startswith("<frozen ") else f"code is loaded by {caller}"


def _compiles(source: Any, name: object) -> str | None:
    text = source.decode(errors="replace") if isinstance(source, bytes) else source
    return f"{name} is compiled" if isinstance(text, str) and _TRAP in text else None


def _imports(module: str, path: list[str] | None) -> str | None:
    inside = [each for each in path or () if os.path.realpath(each).startswith(_MODEL)]
    return f"{module} is looked for in {inside}" if inside else None


def _opens(opened: Any) -> str | None:
    """A file that is open already is a number."""
    path = os.path.abspath(os.fsdecode(opened)) if isinstance(opened, str | bytes) else ""
    if not path.startswith(_MODEL):
        return None
    _note("read", path)
    return f"{path} is opened" if path.endswith(_CODE) else None


_EVENTS: dict[str, Callable[[tuple[Any, ...]], str | None]] = {
    "pickle.find_class": lambda given: f"a pickle asks for {given}",
    "marshal.load": lambda given: _loads(),
    "marshal.loads": lambda given: _loads(),
    "exec": lambda given: _runs(given[0]),
    "compile": lambda given: _compiles(*given),
    "import": lambda given: _imports(given[0], given[2]),
    "open": lambda given: _opens(given[0]),
}


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if (look := _EVENTS.get(event)) and (wrong := look(arguments)):
        _note("wrong", wrong)


_note("begun", os.getpid())
sys.addaudithook(_watch)
