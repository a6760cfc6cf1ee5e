"""Weights from a checkpoint onto the devices."""

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from hex_llm.kernels.quant_matmul.weight import Packed
from hex_llm.loader.blocks import blocks, plain_matrix, read_plain, share_rows
from hex_llm.loader.checkpoint import Checkpoint
from hex_llm.loader.contents import check_checkpoint, stored
from hex_llm.loader.packed import load_packed
from hex_llm.loader.values import Check, check_finite
from hex_llm.models.arch import Arch
from hex_llm.models.few_bits import Quantization, kept
from hex_llm.models.split import Split
from hex_llm.models.weights import WeightSpec, build, specs
from hex_llm.progress import Report, progress, tell_nobody
from hex_llm.quantization.method import Tensor

log = logging.getLogger(__name__)

_READERS = 4  # threads: a disk answers several faster than one


def load[T](
    model: type[T],
    arch: Arch,
    checkpoint: Checkpoint,
    mesh: Mesh,
    dtype: Any,
    *,
    quantization: Quantization | None = None,
    check: Check = "sample",
    report: Report = tell_nobody,
) -> T:
    """The checkpoint's weights, each device reading only the parts of each tensor that it holds.

    Everything that headers can tell is checked before the first byte goes to a device. `check` says how many of
    the values are looked at for NaN and infinity on the way. `report` is told the share that has been read.
    """
    if spare := check_checkpoint(model, arch, checkpoint, quantization):
        log.info("The checkpoint has %d tensors that are not used, such as %s.", len(spare), spare[0])
    wanted = specs(model, arch)
    split = Split.over(arch, mesh)
    total = sum(_bytes_of(checkpoint[name]) for spec in wanted for name in stored(spec, arch, quantization))

    def make(spec: WeightSpec) -> Array | Packed:
        spec, numbers = kept(spec, quantization)
        if numbers is not None:
            return load_packed(spec, numbers, split, checkpoint, mesh, np.dtype(dtype), check, advance)
        return _load_plain(spec, split, checkpoint, mesh, np.dtype(dtype), check, advance)

    shown = progress("Loading weights", "Loaded %s of weights", total, report)
    made: dict[int, Array | Packed] = {}
    with shown as advance, ThreadPoolExecutor(_READERS) as readers:
        for numbers in checkpoint.in_turn([stored(spec, arch, quantization).keys() for spec in wanted]):
            weights = readers.map(make, [wanted[number] for number in numbers])
            # On the devices, for their files may be gone after this.
            made |= jax.block_until_ready(dict(zip(numbers, weights, strict=True)))
    in_order = iter(range(len(wanted)))
    return build(model, arch, lambda _: made[next(in_order)])


def _load_plain(
    spec: WeightSpec,
    split: Split,
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    dtype: np.dtype,
    check: Check,
    advance: Callable[[int], None],
) -> Array:
    shape = spec.shape(split)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # only arrays without a shape have none
        own = [len(range(*each.indices(size))) for each, size in zip(index, shape, strict=True)]
        # Every dimension that is split is so over all of the devices.
        device = max((each.start or 0) // size for each, size in zip(index, own, strict=True))
        return read_share(spec, split, tensors, device, dtype, check, advance)

    return jax.make_array_from_callback(shape, spec.sharding(mesh), read)


def read_share(
    spec: WeightSpec,
    split: Split,
    tensors: Mapping[str, Tensor],
    device: int,
    dtype: np.dtype,
    check: Check,
    advance: Callable[[int], None] = lambda count: None,
) -> np.ndarray:
    """What a device has of a weight."""
    own = np.zeros(spec.share(split), dtype)
    for expert, target in enumerate(own if spec.stack else [own]):
        row = 0
        for part in spec.parts:
            matrix = plain_matrix(spec, part, tensors, expert)
            for block in blocks(part, split, device):
                values = read_plain(part, split, matrix, block)
                check_finite(tensors[part.name.format(expert)], values, check)
                rows, *columns = block.place
                target[row + rows.start : row + rows.stop, *columns] = values
                advance(values.nbytes)
            row += share_rows(part, split)
    return own


def _bytes_of(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
