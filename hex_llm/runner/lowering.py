"""Lowering programs, and keeping what comes of it: a start that has been here before traces no model again.

Tracing is all Python, and gives the same every time: with kernels, half a minute of the same. So what it gives is kept
in a file whose name stands for all that went in.
"""

import hashlib
import logging
import secrets
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
from jax import export

from hex_llm.parallel.backend import backend
from hex_llm.runner.programs import Program, Programs, name_of

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_SUM = hashlib.sha256().digest_size


class Lowering:
    """Lowers programs; through files in a folder, where there is one."""

    def __init__(self, programs: Programs, folder: Path | None):
        self._programs = programs
        self._folder = folder
        self.num_known = 0  # programs that were found there

    def lower(self, program: Program) -> jax.stages.Lowered:
        arguments, donated = self._programs.arguments(program)
        function = _named(self._programs.function(program), program)
        if (path := self.path(program)) is not None:
            exported = _read(path)
            self.num_known += exported is not None
            if exported := exported or _export(function, arguments, path):
                function = _named(exported.call, program)
        return jax.jit(function, donate_argnums=donated).lower(*arguments)

    def path(self, program: Program) -> Path | None:
        """Where a program is kept, if it is."""
        return self._folder and self._folder / f"{name_of(program)}-{self._digest(program)}"

    def _digest(self, program: Program) -> str:
        """Of all that decides what a program is traced to."""
        function = self._programs.own_function(program)  # not wrapped, so that what it settles is to be seen
        settled = function.keywords if isinstance(function, partial) else {}
        leaves, tree = jax.tree.flatten(self._programs.arguments(program)[0])
        parts = [
            _CODE,
            *_surroundings(),
            f"{program} {settled} {tree}",
            *(f"{leaf.shape} {leaf.dtype} {getattr(leaf, 'sharding', None)}" for leaf in leaves),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _named(function: Callable, program: Program) -> Callable:
    """With the name that profiles and compiler messages are to show."""

    def named(*arguments: Any) -> Any:
        return function(*arguments)

    named.__name__ = name_of(program)
    return named


def _digest_of_code() -> str:
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE)} {len(data)}\n".encode() + data)
    return digest.hexdigest()


_CODE = _digest_of_code()  # now, when it is imported: what is traced later is this, whatever the files say then


def _surroundings() -> list[str]:
    """What runs the programs, and how JAX is set."""
    device = jax.devices()[0]
    about = [getattr(device, name, None) for name in ("device_kind", "core_count", "compute_capability")]
    versions = f"{jax.__version__} {device.client.platform_version}"
    settings = [f"{name}={value}" for name, value in sorted(jax.config.values.items()) if "cache" not in name]
    return [versions, f"{backend()} {about} {jax.device_count()}", *settings]


def _export(function: Callable, arguments: tuple[Any, ...], path: Path) -> export.Exported | None:
    """Keeps it too. None where a program cannot be exported, which only costs the next start its time."""
    try:
        with _for_this_version_only():
            exported = export.export(jax.jit(function))(*arguments)
        data = bytes(exported.serialize())
    except Exception as error:
        _warn(f"{path.name} cannot be kept ({type(error).__name__}): it is traced again at the next start.")
        logger.debug("Why it cannot be kept:", exc_info=True)
        return None
    if _digest_of_code() == _CODE:  # or else it was changed on the disk, and some of it may have been imported since
        _write(path, data)
    return exported


@contextmanager
def _for_this_version_only():
    """Exports hold for older versions of JAX too, unless told that they need not, and then leave out what is new."""
    before = jax.config.values["jax_export_ignore_forward_compatibility"]
    jax.config.update("jax_export_ignore_forward_compatibility", True)
    try:
        yield
    finally:
        jax.config.update("jax_export_ignore_forward_compatibility", before)


def _read(path: Path) -> export.Exported | None:
    try:
        content = path.read_bytes()
        data = content[_SUM:]
        if content[:_SUM] == hashlib.sha256(data).digest():
            return export.deserialize(bytearray(data))
        _warn(f"{path} is damaged; what it keeps is made again.")
    except FileNotFoundError:
        pass
    except Exception as error:
        _warn(f"{path} cannot be read ({type(error).__name__}); what it keeps is made again.")
    return None


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: other processes may read it, or write the same."""
    part = path.with_name(f".{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(data).digest() + data)
        part.replace(path)
    except OSError as error:
        _warn(f"{path.parent} cannot be written to ({error.strerror}): programs are traced again at the next start.")
        with suppress(OSError):
            part.unlink()


@cache
def _warn(text: str) -> None:
    """Once, however many programs it is about."""
    logger.warning("%s", text)
