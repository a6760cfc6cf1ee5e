"""The layout of weights in few bits for Hopper, and the products with them, in a simulator that looks for races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.quant_matmul import gpu_layout, reference
from hex_llm.kernels.quant_matmul.weight import TABLES, Codes, Coding

KINDS: list[tuple[Coding, int | None]] = [
    ("int8", None),  # one scale for each row, and no zero
    ("int8", 32),
    ("int8", 128),
    ("int4", None),
    ("int4", 32),
    ("int4", 64),
    ("int4", 128),
    ("int4", 256),
    ("nf4", 64),
    ("nf4", 128),
    ("fp4", 64),
    ("mxfp4", 32),
]


def weight_of(coding: Coding, group: int | None, shape: tuple[int, ...], seed: int = 0) -> Codes:
    random = np.random.default_rng(seed)
    *rows, size = shape
    groups = 1 if group is None else size // group
    codes = random.integers(-128, 128, shape, np.int8) if coding == "int8" else random.integers(0, 16, shape, np.uint8)
    if coding == "mxfp4":
        scale = 2.0 ** random.integers(-9, -3, (*rows, groups))
    else:
        scale = random.uniform(0.5, 2, (*rows, groups)) / (2000 if coding == "int8" else 40)
    zero = None
    if group is not None and coding not in TABLES:
        low, high = (-128, 128) if coding == "int8" else (0, 17)
        zero = jnp.asarray(random.integers(low, high, (*rows, groups)), jnp.float32)
    scale = jnp.asarray(scale, jnp.float32)
    if group is not None:
        scale = scale.astype(jnp.bfloat16).astype(jnp.float32)
    return Codes(jnp.asarray(codes), scale, zero, order=None, input_scale=None, coding=coding)


@pytest.mark.parametrize(("coding", "group"), KINDS)
@pytest.mark.parametrize("shape", [(64, 256), (128, 512), (3, 192, 256)])
def test_what_is_packed_comes_back(coding, group, shape):
    codes = weight_of(coding, group, shape)
    packed = jax.jit(gpu_layout.pack)(codes)
    assert packed.shape == shape
    got = jax.jit(gpu_layout.unpack)(packed)
    assert got.codes.dtype == codes.codes.dtype
    assert (got.codes == codes.codes).all()
    assert (reference.dequantize(got) == reference.dequantize(codes)).all()


@pytest.mark.parametrize(("coding", "group"), KINDS)
def test_a_block_of_a_packed_weight_is_that_block_packed(coding, group):
    codes = weight_of(coding, group, (128, 1024))
    rows, columns = slice(64, 128), slice(512, 1024)
    whole = gpu_layout.pack(codes)
    groups = codes.scale.shape[1]
    share = slice(groups // 2, None) if groups > 1 else slice(None)
    part = Codes(
        codes.codes[rows, columns],
        codes.scale[rows, share],
        None if codes.zero is None else codes.zero[rows, share],
        order=None,
        input_scale=None,
        coding=coding,
    )
    want = gpu_layout.pack(part)
    assert (whole.data[1:, 4:] == want.data).all()
    got = whole.scale[64:] if group is None else whole.scale[1:, 4:]
    assert (got == want.scale).all()


def test_a_packed_weight_is_hardly_larger_than_its_checkpoint():
    packed = jax.eval_shape(gpu_layout.pack, weight_of("int4", 128, (256, 1024)))
    checkpoint = 256 * 1024 // 2 + 256 * 8 * 2 + 256 * 8 // 2  # codes, float16 scales, zeros of 4 bits
    assert sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(packed)) <= 1.03 * checkpoint


@pytest.mark.parametrize(
    ("coding", "shape", "group"), [("int4", (96, 128), 128), ("int4", (64, 192), 64), ("int4", (64, 256), 16)]
)
def test_other_shapes_and_groups_are_refused_by_name(coding, shape, group):
    codes = weight_of(coding, group, shape)
    assert not gpu_layout.supports(codes)
    with pytest.raises(ValueError, match=str(shape[1] // group)):
        gpu_layout.pack(codes)
