"""What of a checkpoint's tensors a device has, piece by piece."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hex_llm.models.split import Run, Split
from hex_llm.models.weights import Part, WeightSpec
from hex_llm.quantization.method import Tensor


class Block(NamedTuple):
    """A rectangle of a part, such as [rows, columns] or only rows."""

    place: tuple[slice, ...]  # in the device's share of the part
    rows: slice  # of the part, as it lies in the checkpoint
    columns: tuple[slice, ...]


def blocks(part: Part, split: Split, device: int) -> Iterator[Block]:
    start = at = 0
    columns = [split.runs(name, device) for name in part.columns]
    for number, name in enumerate(part.rows):
        for rows, *others in itertools.product(split.runs(name, device), *columns):
            if part.alternating:
                count = len(part.rows)
                wanted = slice(count * rows.start + number, count * rows.stop, count)
            else:
                wanted = slice(start + rows.start, start + rows.stop)
            place = (_place(rows, at), *(_place(run, 0) for run in others))
            yield Block(place, wanted, tuple(slice(run.start, run.stop) for run in others))
        start += split.arch.sizes[name]
        at += split.shard(name)


def share_rows(part: Part, split: Split) -> int:
    """Of a part, on a device."""
    return sum(split.shard(name) for name in part.rows)


def _place(run: Run, offset: int) -> slice:
    return slice(offset + run.at, offset + run.at + run.stop - run.start)


type Matrix = Callable[[tuple[slice, ...]], np.ndarray]  # reads a part of a tensor, or of one expert's in it


def plain_matrix(spec: WeightSpec, part: Part, tensors: Mapping[str, Tensor], expert: int) -> Matrix:
    if spec.stack == "joined":
        return lambda index: tensors[part.name][(slice(expert, expert + 1), *index)][0]
    return lambda index: tensors[part.name.format(expert)][index]


def read_plain(part: Part, split: Split, read: Matrix, block: Block) -> np.ndarray:
    """The block's values, as the device has them."""
    if part.transposed:
        values = read((*block.columns, block.rows)).swapaxes(0, -1)
    else:
        values = read((block.rows, *block.columns))
    return pairs_apart(values, split.arch.head_dim) if part.neighbours else values


def pairs_apart(rows: Any, head_dim: int) -> Any:
    """[heads * head_dim, ...] whose dimensions that turn together are neighbours, with the first of each pair before
    all second ones. Of numpy's arrays or of JAX's."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
