"""Lowering programs, and keeping what comes of it: a start that has been here before traces no model again.

Tracing is all Python, and gives the same every time: with kernels, half a minute of the same. So what it gives is kept
in a file whose name stands for all that went in.
"""

import functools
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax import export

from hex_llm.runner.programs import Program, Programs, name_of

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]

# JAX promises the meaning of an exported program for other versions of itself, with kernels left out. A file is for
# this version only, so nothing has to be promised.
_KERNELS = [export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu_v2", "tpu_custom_call")]
jax.config.update("jax_export_ignore_forward_compatibility", True)


class Lowering:
    """Lowers programs; through files in a folder, where there is one."""

    def __init__(self, programs: Programs, folder: Path | None):
        self._programs = programs
        self._folder = folder

    def lower(self, program: Program) -> jax.stages.Lowered:
        arguments, donated = self._programs.arguments(program)
        function = self._programs.function(program)
        if self._folder is not None:
            function = self._exported(self._folder, program, arguments).call
        return jax.jit(_named(function, program), donate_argnums=donated).lower(*arguments)

    def _exported(self, folder: Path, program: Program, arguments: tuple[Any, ...]) -> export.Exported:
        path = folder / f"{name_of(program)}-{self._digest(program, arguments)}"
        if data := _read(path):
            return export.deserialize(bytearray(data))
        function = jax.jit(_named(self._programs.function(program), program))
        exported = export.export(function, disabled_checks=_KERNELS)(*arguments)
        _write(path, bytes(exported.serialize()))
        return exported

    def _digest(self, program: Program, arguments: tuple[Any, ...]) -> str:
        leaves, tree = jax.tree.flatten(arguments)
        parts = [
            _surroundings(),
            repr((self._programs.arch, self._programs.shapes, program)),
            str(tree),
            *(f"{leaf.shape} {leaf.dtype} {getattr(leaf, 'sharding', None)}" for leaf in leaves),
            *(f"{name}={value}" for name, value in sorted(jax.config.values.items()) if "cache" not in name),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _named(function: Any, program: Program) -> Any:
    """With the name that profiles and compiler messages are to show."""

    def named(*arguments: Any) -> Any:
        return function(*arguments)

    named.__name__ = name_of(program)
    return named


@functools.cache
def _surroundings() -> str:
    """All that decides what a program is traced to, but for its own description: the code, and what runs it."""
    device = jax.devices()[0]
    code = hashlib.sha256()
    for path, data in _sources(_PACKAGE):
        code.update(f"{path} {len(data)}\n".encode() + data)
    versions = f"{jax.__version__} {device.client.platform_version}"
    return f"{code.hexdigest()}\n{versions}\n{jax.default_backend()} {device.device_kind} {jax.device_count()}"


def _sources(package: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(package.rglob("*.py")):
        yield str(path.relative_to(package)), path.read_bytes()


_SUM = hashlib.sha256().digest_size


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read (%s); what it keeps is made again.", path, error.strerror)
        return None
    data = content[_SUM:]
    if content[:_SUM] != hashlib.sha256(data).digest():
        logger.warning("%s is damaged; what it keeps is made again.", path)
        return None
    return data


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: other processes may read it, or write the same."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(data).digest() + data)
        part.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s); the next start has to make it again.", path, error.strerror)
