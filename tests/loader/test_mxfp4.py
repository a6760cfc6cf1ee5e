"""MXFP4 against a decoder written out here, and what is refused."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from hex_llm.errors import CheckpointError
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.mxfp4 import widened

TABLE = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def write(folder, **tensors):
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def random_blocks(experts=2, rows=6, groups=3, seed=0):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, rows, groups, 16), dtype=np.uint8)
    return blocks, rng.integers(110, 140, (experts, rows, groups), dtype=np.uint8)


def decoded(blocks, scales):
    """[experts, in, out], number by number."""
    experts, rows, groups, _ = blocks.shape
    out = np.zeros((experts, groups * 32, rows))
    for expert, row, group, byte in np.ndindex(blocks.shape):
        pair = int(blocks[expert, row, group, byte])
        for half, nibble in enumerate((pair & 15, pair >> 4)):
            value = TABLE[nibble] * 2.0 ** (int(scales[expert, row, group]) - 127)
            out[expert, group * 32 + 2 * byte + half, row] = value
    return out


def test_every_number_is_that_of_its_nibble_and_scale(tmp_path):
    blocks, scales = random_blocks()
    checkpoint = widened(write(tmp_path, w_blocks=blocks, w_scales=scales, other=np.ones(3, np.float32)))
    assert set(checkpoint) == {"w", "other"}
    tensor = checkpoint["w"]
    assert (tensor.shape, tensor.dtype) == ((2, 96, 6), np.dtype(np.float32))
    expected = decoded(blocks, scales)
    whole = tensor[(slice(None), slice(None), slice(None))]
    np.testing.assert_array_equal(whole.astype(np.float64), expected)
    part = tensor[(slice(1, 2), slice(16, 80), slice(1, 6, 2))]  # as a shard of alternating rows is read
    np.testing.assert_array_equal(part.astype(np.float64), expected[1:2, 16:80, 1:6:2])
    part = tensor[(slice(0, 1), slice(70, 90), slice(0, 6))]
    np.testing.assert_array_equal(part.astype(np.float64), expected[:1, 70:90])


def test_blocks_without_scales_or_of_another_shape_are_refused(tmp_path):
    blocks, scales = random_blocks()
    with pytest.raises(CheckpointError, match="w_blocks without w_scales"):
        widened(write(tmp_path, w_blocks=blocks))
    with pytest.raises(CheckpointError, match="not blocks of 16 bytes"):
        widened(write(tmp_path, w_blocks=blocks, w_scales=scales[:, 1:].copy()))
    with pytest.raises(CheckpointError, match=r"w_scales .* is of type float32, not uint8"):
        widened(write(tmp_path, w_blocks=blocks, w_scales=scales.astype(np.float32)))
