"""The layout of weights in few bits for Hopper, and the products with them, in a simulator that looks for races."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.quant_matmul import gpu, gpu_decode, gpu_layout, reference
from hex_llm.kernels.quant_matmul.gpu import Plan
from hex_llm.kernels.quant_matmul.weight import TABLES, Codes, Coding, Packed
from tests.kernels.simulator import simulation

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


@pytest.fixture
def simulator(monkeypatch):
    """The simulator has no inlined instructions: codes are decoded as `unpack` does."""

    def decode(words, scales, coding, grouping, chunk):
        # Each thread arrives at a barrier itself, with its loads done. The simulator knows no such thing, and wants a
        # fence before a copy may take the place of what was loaded.
        plgpu.commit_smem()
        codes = gpu_layout.unpack_codes(words[None, None], coding)
        values = codes.astype(jnp.float32)
        if coding in TABLES:  # a kernel has no arrays of its own, only numbers
            values = sum(jnp.where(codes == i, float(number), 0) for i, number in enumerate(TABLES[coding]))
        if grouping is not None:
            scale, zero = gpu_layout.unpack_scales(jnp.stack(scales)[None, None], coding)
            if not grouping.has_zeros and grouping.words == 1:
                scale = scale[:, chunk : chunk + 1]
            values = values.reshape(64, scale.shape[1], -1)
            values = ((values if zero is None else values - zero[..., None]) * scale[..., None]).reshape(64, 64)
        return values.astype(jnp.bfloat16)

    monkeypatch.setattr(gpu_decode, "decode", decode)
    with simulation(all_phases=True):
        yield


def inputs(coding: Coding, group: int | None, tokens: int, out: int, size: int) -> tuple[jax.Array, Packed, Codes]:
    codes = weight_of(coding, group, (out, size))
    x = jax.random.normal(jax.random.key(tokens + out + size), (tokens, size), jnp.bfloat16)
    return x, gpu_layout.pack(codes), codes


def assert_close(got: jax.Array, want: jax.Array) -> None:
    """Equal but for the rounding of each number of the weight to bfloat16."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    error = jnp.linalg.norm((got - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32))
    assert error < 4e-3


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(("coding", "group"), KINDS)
def test_the_product_is_the_reference_s_with_every_coding(coding, group):
    x, weight, codes = inputs(coding, group, 8, 128, 512)
    assert_close(gpu.matmul(x, weight, plan=Plan(workers=2, slots=2, blocks=2)), reference.matmul(x, codes))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "out", "size", "plan"),
    [
        (1, 384, 256, Plan(workers=1, slots=3)),  # six tiles on four blocks
        (3, 640, 384, Plan(workers=2, slots=4)),  # the ring is not a whole number of pieces
        (24, 256, 256, Plan(workers=2, stack=2, slots=2)),
        (16, 128, 512, Plan(workers=1, splits=2, slots=2)),
        (40, 256, 512, Plan(workers=4, splits=4, slots=2)),  # four parts to be added
        (16, 512, 512, Plan(workers=1, stack=2, splits=2, slots=3)),
        (128, 256, 128, Plan(workers=2, stack=2, slots=2)),
    ],
)
@pytest.mark.parametrize(("coding", "group"), [("int8", None), ("int4", 128)])
def test_the_product_is_the_reference_s_however_it_is_cut(tokens, out, size, plan, coding, group):
    x, weight, codes = inputs(coding, group, tokens, out, size)
    plan = dataclasses.replace(plan, blocks=4)
    assert_close(gpu.matmul(x, weight, plan=plan), reference.matmul(x, codes))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(("coding", "group"), [("int8", None), ("int4", 64)])
@pytest.mark.parametrize(
    ("tokens", "out", "size", "activation"), [(8, 256, 256, "silu"), (40, 512, 128, "gelu"), (128, 256, 384, "silu")]
)
def test_the_gated_product_is_the_reference_s(tokens, out, size, activation, coding, group):
    x, weight, codes = inputs(coding, group, tokens, out, size)
    plan = Plan(workers=2, stack=2, slots=2, blocks=4)
    got = gpu.gated_matmul(x, weight, activation, plan=plan)
    assert_close(got, reference.gated_matmul(x, codes, activation))
