"""Weights onto the devices: from a checkpoint, strictly, or made up there."""

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from hex_llm.errors import CheckpointError
from hex_llm.loader.checkpoint import Checkpoint, LazyTensor
from hex_llm.models.arch import Arch
from hex_llm.models.weights import WeightSpec, build, specs
from hex_llm.parallel.mesh import TENSOR

log = logging.getLogger(__name__)

type Check = Literal["sample", "full", "off"]

_FLOATS = {np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32)}
_SAMPLED = 65536  # values of each shard that the finite check looks at
_READERS = 4  # threads: a disk answers several faster than one
_DUMMY_SPREAD = 0.035  # uniform in +-0.035 has the standard deviation of 0.02 that models are born with


def load[T](
    model: type[T],
    arch: Arch,
    checkpoint: Checkpoint,
    mesh: Mesh,
    dtype: Any,
    *,
    check: Check = "sample",
    report: Callable[[float], None] = lambda share: None,
) -> T:
    """The checkpoint's weights, each device reading only the parts of each tensor that it holds.

    Everything that headers can tell is checked before the first byte goes to a device. `check` says how many of
    the values are looked at for NaN and infinity on the way. `report` is told the share that has been read.
    """
    arch.check_shards(mesh.shape[TENSOR])
    check_checkpoint(model, arch, checkpoint)
    wanted = specs(model, arch)
    total = sum(_bytes_of(spec, checkpoint) for spec in wanted)
    with _progress(total, report) as advance, ThreadPoolExecutor(_READERS) as readers:
        make = functools.partial(_load_weight, arch, checkpoint, mesh, np.dtype(dtype), check, advance)
        weights = readers.map(make, wanted)
        return build(model, arch, lambda _: next(weights))


def check_checkpoint(model: type, arch: Arch, checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint whose names, shapes and types are not those that config.json calls for."""
    wanted = specs(model, arch)
    _check_names(wanted, arch, checkpoint)
    _check_shapes(wanted, arch, checkpoint)


def _load_weight(
    arch: Arch,
    checkpoint: Checkpoint,
    mesh: Mesh,
    dtype: np.dtype,
    check: Check,
    advance: Callable[[int], None],
    spec: WeightSpec,
) -> Array:
    tensors = [checkpoint[part.name] for part in spec.parts]
    shape, num_shards = spec.shape(arch), spec.num_row_shards(mesh)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # only arrays without a shape have none
        shard = (index[0].start or 0) * num_shards // shape[0]
        pieces = [_read_rows(tensor, shard, num_shards, index[1:]) for tensor in tensors]
        for tensor, piece in zip(tensors, pieces, strict=True):
            _check_finite(tensor, piece, check)
        own = _joined(pieces, dtype)
        advance(sum(piece.nbytes for piece in pieces))
        return own

    return jax.make_array_from_callback(shape, spec.sharding(mesh), read)


def _read_rows(tensor: LazyTensor, shard: int, num_shards: int, columns: tuple[slice, ...]) -> np.ndarray:
    rows = tensor.shape[0] // num_shards
    return tensor[(slice(shard * rows, (shard + 1) * rows), *columns)]


def _joined(pieces: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """One array in memory of its own: a device array must not change when the file does."""
    own = np.empty((sum(len(piece) for piece in pieces), *pieces[0].shape[1:]), dtype)
    row = 0
    for piece in pieces:
        own[row : row + len(piece)] = piece
        row += len(piece)
    return own


def _check_finite(tensor: LazyTensor, piece: np.ndarray, check: Check) -> None:
    if check == "off":
        return
    # Whole rows at even distances: a stride over single values would touch the same pages for less.
    step = max(1, piece.size // _SAMPLED) if check == "sample" else 1
    if not np.isfinite(piece[::step]).all():
        raise CheckpointError(f"Tensor {tensor.name} in {tensor.path} holds NaN or infinity.")


def _check_names(wanted: list[WeightSpec], arch: Arch, checkpoint: Checkpoint) -> None:
    expected = {part.name for spec in wanted for part in spec.parts}
    if missing := sorted(expected - checkpoint.keys()):
        raise CheckpointError(f"{checkpoint.folder} lacks {_listed(missing)} that config.json calls for.")
    extra = sorted(name for name in checkpoint.keys() - expected if not _harmless(name, arch))
    if extra:
        raise CheckpointError(f"{checkpoint.folder} has {_listed(extra)} that config.json has no place for.")


def _harmless(name: str, arch: Arch) -> bool:
    """Old Llama files carry the rotary frequencies, and tied ones may repeat the embedding as the head."""
    return name.endswith(".rotary_emb.inv_freq") or (arch.tied and name == "lm_head.weight")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({shown})"


def _check_shapes(wanted: list[WeightSpec], arch: Arch, checkpoint: Checkpoint) -> None:
    for part in (part for spec in wanted for part in spec.parts):
        tensor, shape = checkpoint[part.name], part.shape(arch)
        if tensor.shape != shape:
            raise CheckpointError(
                f"Tensor {part.name} in {tensor.path} has shape {list(tensor.shape)}; "
                f"config.json makes it {list(shape)}."
            )
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"Tensor {part.name} in {tensor.path} is of type {tensor.dtype}; "
                "this version reads float16, bfloat16 and float32."
            )


def _bytes_of(spec: WeightSpec, checkpoint: Checkpoint) -> int:
    tensors = [checkpoint[part.name] for part in spec.parts]
    return sum(int(np.prod(tensor.shape)) * tensor.dtype.itemsize for tensor in tensors)


@contextmanager
def _progress(total: int, report: Callable[[float], None]) -> Iterator[Callable[[int], None]]:
    """Shows the bytes read, and the rate: as a bar to a person, as a line to a log."""
    columns = (TextColumn("Loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
    lock, start, done = threading.Lock(), time.monotonic(), 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            bar.update(task, completed=done, total=max(done, total))
            report(done / max(done, total, 1))

    with bar:
        task = bar.add_task("", total=total)
        yield advance
    seconds = max(time.monotonic() - start, 1e-9)
    log.info("Loaded %.3f GB of weights in %.1f s (%.2f GB/s).", done / 1e9, seconds, done / 1e9 / seconds)


def dummy[T](model: type[T], arch: Arch, mesh: Mesh, dtype: Any, *, seed: int = 0) -> T:
    """Random weights, made on the devices that hold them, equal for equal seeds."""
    arch.check_shards(mesh.shape[TENSOR])
    key = jax.random.key(seed)
    number = iter(range(len(specs(model, arch))))

    def make(spec: WeightSpec) -> Array:
        own = jax.random.fold_in(key, next(number))
        return _dummy_weight(own, spec.shape(arch), jnp.dtype(dtype), spec.dummy, spec.sharding(mesh))

    return build(model, arch, make)


def _dummy_weight(
    key: Array, shape: tuple[int, ...], dtype: Any, value: float | None, sharding: NamedSharding
) -> Array:
    return _dummy_program(shape, dtype, value, sharding)(key)


@functools.cache
def _dummy_program(
    shape: tuple[int, ...], dtype: Any, value: float | None, sharding: NamedSharding
) -> Callable[[Array], Array]:
    """One compiled function per shape: layers are alike, so a model has a handful."""

    def fill(key: Array) -> Array:
        if value is not None:
            return jnp.full(shape, value, dtype)
        return jax.random.uniform(key, shape, dtype, -_DUMMY_SPREAD, _DUMMY_SPREAD)

    return jax.jit(fill, out_shardings=sharding)
