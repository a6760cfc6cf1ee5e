"""A safetensors file, of which nothing is read but the header until a tensor is sliced.

The format is read here rather than by the safetensors library so that a damaged file can be told with the tensor
it hurts, and so that a device's share of a tensor is mapped from the disk without the rest of it.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hex_llm.errors import CheckpointError
from hex_llm.model_files import decode_json, impostor

# What numbers may be that are kept as they are.
FLOATS = tuple(np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32))

_LONGEST_HEADER = 100_000_000
_LENGTH_BYTES = 8
_MOST_DIMENSIONS, _LARGEST = 8, 2**63  # so that any product of sizes can be told in a message
_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is still on the disk."""

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # of its first byte in the file

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part of the tensor. Bytes come from the disk as they are looked at."""
        if math.prod(self.shape) == 0:
            return np.empty(self.shape, self.dtype)[index]
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=self.shape)[index]


def read_header(path: Path, longest: int = _LONGEST_HEADER) -> list[LazyTensor]:
    """The tensors of one file, in their order in it, which must fill it to the last byte. A header may have `longest`
    bytes.
    """
    try:
        with path.open("rb") as file:
            number = file.fileno()
            size = os.fstat(number).st_size
            return parse_header(path, size, lambda first, end: os.pread(number, end - first, first), longest)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def parse_header(
    path: Path, size: int, read: Callable[[int, int], bytes], longest: int = _LONGEST_HEADER
) -> list[LazyTensor]:
    """The same of a file wherever it is; `read` gets bytes of it, from the first to before the second number."""
    start = read(0, min(size, 100)) if size else b""
    if what := impostor(start):
        raise CheckpointError(f"{path} is {what}.")
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
        raise CheckpointError(
            f"{path} is cut short or is no safetensors file: its {size} bytes do not hold its header."
        )
    if length > longest:
        raise CheckpointError(f"{path} has a header of {length} bytes; at most {longest} are read.")
    header = read(_LENGTH_BYTES, _LENGTH_BYTES + length) if length else b""
    entries = decode_json(header, f"The header of {path}", object_pairs_hook=lambda pairs: _unique(pairs, path))
    entries.pop("__metadata__", None)
    data = _LENGTH_BYTES + length
    tensors = [_entry(path, name, entry, data) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, _num_bytes(tensor)))
    _check_coverage(path, tensors, data, size)
    return tensors


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"The header of {path} holds {twin} twice.")
    return values


def _entry(path: Path, name: str, entry: Any, data: int) -> LazyTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            len(shape) <= _MOST_DIMENSIONS
            and all(type(size) is int and 0 <= size < _LARGEST for size in shape)
            and max(abs(begin), abs(end)) < _LARGEST
        ):
            pass
        case _:
            raise CheckpointError(f"The header of {path} describes tensor {name} in an unknown way.")
    if dtype not in _DTYPES:
        raise CheckpointError(f"Tensor {name} in {path} has type {dtype[:60]!r}, which is not known.")
    tensor = LazyTensor(name, path, tuple(shape), _DTYPES[dtype], data + begin)
    if begin < 0 or end - begin != _num_bytes(tensor):
        raise CheckpointError(
            f"Tensor {name} in {path} has {end - begin} bytes, but {dtype} {list(shape)} needs {_num_bytes(tensor)}."
        )
    return tensor


def _num_bytes(tensor: LazyTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _check_coverage(path: Path, tensors: list[LazyTensor], data: int, size: int) -> None:
    expected = data
    for tensor in tensors:
        if tensor.offset != expected:
            raise CheckpointError(f"Tensor {tensor.name} in {path} overlaps another, or a gap lies before it.")
        expected += _num_bytes(tensor)
        if expected > size:
            raise CheckpointError(
                f"{path} is cut short: tensor {tensor.name} ends at byte {expected}, the file at byte {size}."
            )
    if expected < size:
        raise CheckpointError(f"{path} has {size - expected} bytes more than its header describes.")
