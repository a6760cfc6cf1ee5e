"""Weights onto the devices: from a checkpoint, strictly, or made up there."""

import functools
import itertools
import logging
import math
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
from hex_llm.loader.checkpoint import Checkpoint, Tensor
from hex_llm.models.arch import Arch
from hex_llm.models.split import Run, Split
from hex_llm.models.weights import Part, WeightSpec, build, specs

log = logging.getLogger(__name__)

type Check = Literal["sample", "full", "off"]

_FLOATS = {np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32)}
_SAMPLED = 65536  # values of each shard that the finite check looks at
_COMPARED_ROWS = 64  # of two tensors that should be one
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
    check_checkpoint(model, arch, checkpoint)
    wanted = specs(model, arch)
    total = sum(_bytes_of(checkpoint[name]) for spec in wanted for name in spec.tensors(arch))
    with _progress(total, report) as advance, ThreadPoolExecutor(_READERS) as readers:
        make = functools.partial(
            _load_weight, Split.over(arch, mesh), checkpoint, mesh, np.dtype(dtype), check, advance
        )
        weights = readers.map(make, wanted)
        return build(model, arch, lambda _: next(weights))


def check_checkpoint(model: type, arch: Arch, checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint whose names, shapes and types are not those that config.json calls for."""
    wanted = specs(model, arch)
    _check_names(wanted, arch, checkpoint)
    _check_shapes(wanted, arch, checkpoint)
    _check_tie(arch, checkpoint)


def _load_weight(
    split: Split,
    checkpoint: Checkpoint,
    mesh: Mesh,
    dtype: np.dtype,
    check: Check,
    advance: Callable[[int], None],
    spec: WeightSpec,
) -> Array:
    shape = spec.shape(split)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        """A device's share."""
        assert index is not None  # only arrays without a shape have none
        own = np.zeros([len(range(*each.indices(size))) for each, size in zip(index, shape, strict=True)], dtype)
        # Every dimension that is split is so over all of the devices.
        starts = zip(index, own.shape, strict=True)
        device = max((each.start or 0) // size for each, size in starts)
        for expert, target in enumerate(own if spec.stack else [own]):
            row = 0
            for part in spec.parts:
                matrix = _matrix(spec, part, checkpoint, expert)
                for place, block in _blocks(part, split, matrix, device):
                    _check_finite(checkpoint[part.name.format(expert)], block, check)
                    target[row + place[0].start : row + place[0].stop, *place[1:]] = block
                    advance(block.nbytes)
                row += sum(split.shard(name) for name in part.rows)
        return own

    return jax.make_array_from_callback(shape, spec.sharding(mesh), read)


type _Matrix = Callable[[tuple[slice, ...]], np.ndarray]  # reads a part of a tensor, or of one expert's in it


def _matrix(spec: WeightSpec, part: Part, checkpoint: Checkpoint, expert: int) -> _Matrix:
    if spec.stack == "joined":
        return lambda index: checkpoint[part.name][(slice(expert, expert + 1), *index)][0]
    return lambda index: checkpoint[part.name.format(expert)][index]


def _blocks(part: Part, split: Split, read: _Matrix, device: int) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """What a device has of a part, piece by piece: where it lies there, and its values."""
    start = at = 0
    columns = [split.runs(name, device) for name in part.columns]
    for number, name in enumerate(part.rows):
        for rows, *others in itertools.product(split.runs(name, device), *columns):
            if part.alternating:
                count = len(part.rows)
                wanted = slice(count * rows.start + number, count * rows.stop, count)
            else:
                wanted = slice(start + rows.start, start + rows.stop)
            sides = [slice(run.start, run.stop) for run in others]
            block = read((*sides, wanted)).swapaxes(0, -1) if part.transposed else read((wanted, *sides))
            if part.neighbours:
                pairs = block.reshape(-1, split.arch.head_dim // 2, 2, *block.shape[1:])
                block = pairs.swapaxes(1, 2).reshape(block.shape)
            yield tuple(_place(run, offset) for run, offset in ((rows, at), *((run, 0) for run in others))), block
        start += split.arch.sizes[name]
        at += split.shard(name)


def _place(run: Run, offset: int) -> slice:
    return slice(offset + run.at, offset + run.at + run.stop - run.start)


def _check_finite(tensor: Tensor, piece: np.ndarray, check: Check) -> None:
    if check == "off":
        return
    # Whole rows at even distances: a stride over single values would touch the same pages for less.
    step = max(1, piece.size // _SAMPLED) if check == "sample" else 1
    if not np.isfinite(piece[::step]).all():
        raise CheckpointError(f"Tensor {tensor.name} in {tensor.path} holds NaN or infinity.")


def _check_names(wanted: list[WeightSpec], arch: Arch, checkpoint: Checkpoint) -> None:
    expected = {name for spec in wanted for name in spec.tensors(arch)}
    if missing := sorted(expected - checkpoint.keys()):
        raise CheckpointError(f"{checkpoint.folder} lacks {_listed(missing)} that config.json calls for.")
    extra = sorted(name for name in checkpoint.keys() - expected if not _harmless(name, arch))
    if extra:
        raise CheckpointError(f"{checkpoint.folder} has {_listed(extra)} that config.json has no place for.")


def _harmless(name: str, arch: Arch) -> bool:
    """Old Llama files carry the rotary frequencies, and tied ones may repeat the embedding as the head."""
    return name.endswith(".rotary_emb.inv_freq") or (arch.tied and name == "lm_head.weight")


def _check_tie(arch: Arch, checkpoint: Checkpoint) -> None:
    """A head of its own in a model whose head is the embedding: which of the two is meant cannot be told."""
    head = checkpoint.get("lm_head.weight")
    if not arch.tied or head is None:
        return
    embed, rows = checkpoint["model.embed_tokens.weight"], (slice(0, _COMPARED_ROWS),)
    if head.shape != embed.shape or not np.array_equal(head[rows], embed[rows]):
        raise CheckpointError(
            f"Tensor lm_head.weight in {head.path} differs from model.embed_tokens.weight, and tie_word_embeddings in "
            "config.json says that they are one."
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({shown})"


def _check_shapes(wanted: list[WeightSpec], arch: Arch, checkpoint: Checkpoint) -> None:
    for name, shape in ((name, shape) for spec in wanted for name, shape in spec.tensors(arch).items()):
        tensor = checkpoint[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"Tensor {name} in {tensor.path} has shape {list(tensor.shape)}; config.json makes it {list(shape)}."
            )
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"Tensor {name} in {tensor.path} is of type {tensor.dtype}; "
                "this version reads float16, bfloat16 and float32."
            )


def _bytes_of(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


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
    split = Split.over(arch, mesh)
    number = iter(range(len(specs(model, arch))))

    def make(spec: WeightSpec) -> Array:
        value = arch.rms.neutral if spec.neutral else None
        fill = _dummy_program(spec.shape(split), jnp.dtype(dtype), value, spec.sharding(mesh))
        return fill(np.uint32(seed), np.uint32(next(number)))

    return build(model, arch, make)


@functools.cache
def _dummy_program(
    shape: tuple[int, ...], dtype: Any, value: float | None, sharding: NamedSharding
) -> Callable[[np.uint32, np.uint32], Array]:
    """One compiled function per shape: layers are alike, so a model has a handful."""

    def fill(seed: Array, number: Array) -> Array:
        if value is not None:
            return jnp.full(shape, value, dtype)
        key = jax.random.fold_in(jax.random.key(seed), number)
        return jax.random.uniform(key, shape, dtype, -_DUMMY_SPREAD, _DUMMY_SPREAD)

    return jax.jit(fill, out_shardings=sharding)
