"""MXFP4, the 4-bit format of gpt-oss: 32 numbers share a power of two. Widened while it is read."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hex_llm.errors import CheckpointError
from hex_llm.loader.checkpoint import Checkpoint
from hex_llm.quantization.method import Tensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_PAIRS = 16  # bytes that share a scale, two numbers in each
_GROUP = 2 * _PAIRS
_BIAS = 127  # of the exponent
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
# The two numbers of each byte, of which the low half comes first; as one word, so that looking both up is one step.
_PAIR_OF = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1).view(np.uint64)[:, 0]


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """[experts, in, out], as an unquantized checkpoint has it, from blocks [experts, out, in/32, 16] and scales."""

    name: str
    blocks: Tensor
    scales: Tensor

    @property
    def path(self) -> Path:
        return self.blocks.path

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups, _ = self.blocks.shape
        return experts, groups * _GROUP, rows

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        experts, columns, rows = index
        first, last, step = columns.indices(self.shape[1])
        groups = slice(first // _GROUP, -(-last // _GROUP))
        packed = self.blocks[(experts, rows, groups, slice(None))]
        scales = np.ldexp(np.float32(1), self.scales[(experts, rows, groups)].astype(np.int32) - _BIAS)
        wide = _PAIR_OF[packed].view(np.float32) * scales[..., None]
        start = groups.start * _GROUP
        return wide.reshape(*packed.shape[:2], -1).swapaxes(1, 2)[:, first - start : last - start : step]


def widened(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with each pair of blocks and scales in it as the one tensor that they stand for."""
    tensors: dict[str, Tensor] = dict(checkpoint)
    for name in [name for name in tensors if name.endswith(_BLOCKS)]:
        base = name.removesuffix(_BLOCKS)
        blocks, scales = tensors.pop(name), tensors.pop(base + _SCALES, None)
        if scales is None:
            raise CheckpointError(f"{checkpoint.folder} has {name} without {base + _SCALES}.")
        if len(blocks.shape) != 4 or blocks.shape[3] != _PAIRS or scales.shape != blocks.shape[:3]:
            raise CheckpointError(
                f"Tensors {name} {list(blocks.shape)} and {base + _SCALES} {list(scales.shape)} in {blocks.path} are "
                f"not blocks of {_PAIRS} bytes and their scales."
            )
        for tensor in (blocks, scales):
            if tensor.dtype != np.uint8:
                raise CheckpointError(f"Tensor {tensor.name} in {tensor.path} is of type {tensor.dtype}, not uint8.")
        tensors[base] = Mxfp4Tensor(base, blocks, scales)
    return Checkpoint(checkpoint.folder, tensors)
