"""The layout of weights in few bits for Hopper, and the products with them, in a simulator that looks for races."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.quant_matmul import gpu, gpu_decode, gpu_layout, gpu_plan, plain, reference
from hex_llm.kernels.quant_matmul.gpu_plan import Plan
from hex_llm.kernels.quant_matmul.weight import TABLES, Codes, Coding, Packed
from tests.kernels.numbers import normal
from tests.kernels.simulator import simulation

type Kind = tuple[Coding, int | None]  # and the size of its groups; None: one scale for each row, and no zero

KINDS: list[Kind] = [
    ("int8", None),
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


SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "qkv of 70B": (10240, 8192),
    "o of 70B": (8192, 8192),
    "gate_up of 70B": (57344, 8192),
    "down of 70B": (8192, 28672),
    "gate_up of Qwen2.5-7B": (37888, 3584),
    "down of Qwen2.5-7B": (3584, 18944),
    "down of Llama-2-7B": (4096, 11008),
    "down of Llama-2-7B for two devices": (4096, 5504),
    "half of down of Llama-2-7B": (2048, 11008),
}
PLANNED = [(name, kind) for name, (_, size) in SHAPES.items() for kind in KINDS if size % (kind[1] or 1) == 0]


def shaped(kind: Kind, out: int, size: int) -> Codes:
    """What a weight of this shape is like."""
    coding, group = kind
    one = weight_of(coding, group, (64, 256))
    groups = 1 if group is None else size // group

    def of(array: jax.Array, columns: int) -> Any:
        return jax.ShapeDtypeStruct((out, columns), array.dtype)

    zero = None if one.zero is None else of(one.zero, groups)
    return Codes(of(one.codes, size), of(one.scale, groups), zero, order=None, input_scale=None, coding=coding)


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
        if grouping is None and coding in gpu_layout.WHOLE:
            values = values / gpu_layout.SMALLER
        if grouping is not None:
            scale, zero = gpu_layout.unpack_scales(jnp.stack(scales)[None, None], coding)
            if not grouping.has_zeros and grouping.words == 1:
                scale = scale[:, chunk : chunk + 1]
            values = values.reshape(64, scale.shape[1], -1)
            values = ((values if zero is None else values - zero[..., None]) * scale[..., None]).reshape(64, 64)
        return values.astype(jnp.bfloat16)

    monkeypatch.setattr(gpu_decode, "decode", decode)
    with simulation(all_phases=True) as early_reads:
        yield early_reads


def inputs(kind: Kind, tokens: int, out: int, size: int) -> tuple[jax.Array, Packed, Codes]:
    codes = weight_of(*kind, (out, size))
    return normal(tokens + out + size, tokens, size), gpu_layout.pack(codes), codes


def assert_close(got: jax.Array, want: jax.Array) -> None:
    """Equal but for the rounding of each number of the weight to bfloat16."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    error = jnp.linalg.norm((got - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32))
    assert error < 4e-3


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("coding", "group", "depth"),
    [*((*kind, 128) for kind in KINDS), ("int8", 32, 64), ("int4", 128, 64), ("nf4", 64, 64), ("mxfp4", 32, 64)],
)
def test_the_product_is_the_reference_s_with_every_coding(coding, group, depth):
    x, weight, codes = inputs((coding, group), 8, 64, 256)
    plan = Plan(workers=1, stack=1, depth=depth, slots=3)
    assert_close(gpu.matmul(x, weight, plan=plan), reference.matmul(x, codes))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "out", "size", "plan", "kind"),
    [
        (1, 384, 256, Plan(workers=1, stack=1, slots=3), ("int4", 128)),  # six tiles on four blocks
        (3, 640, 384, Plan(workers=2, stack=1, slots=4), ("int8", None)),  # the ring is not a whole number of pieces
        (24, 256, 256, Plan(workers=2, stack=2, slots=2), ("int8", None)),
        (16, 128, 512, Plan(workers=1, stack=1, splits=2), ("int4", 128)),  # the ring is never full
        (40, 256, 512, Plan(workers=2, stack=1, splits=4, slots=2), ("int8", None)),  # four parts to be added
        (16, 512, 512, Plan(workers=1, stack=2, splits=2, slots=3), ("int4", 128)),
        (128, 256, 128, Plan(workers=2, stack=2, depth=64, slots=3), ("int4", 128)),
        (8, 192, 512, Plan(workers=1, stack=1, even=True, slots=3), ("int4", 128)),  # three pieces on four blocks
        (8, 64, 1280, Plan(workers=1, stack=1, even=True, slots=2), ("int8", None)),  # all four have a share of one
        (24, 384, 384, Plan(workers=1, stack=1, even=True, slots=3), ("int8", 128)),  # one each, and two for four
        (8, 64, 256, Plan(workers=1, stack=1, even=True, slots=3), ("int4", 64)),  # more blocks than tiles
        (8, 192, 384, Plan(workers=1, stack=1, even=True, slots=3), ("int4", 128)),  # a share could be a whole piece
        (8, 320, 384, Plan(workers=1, stack=1, even=True, slots=3), ("int4", 128)),  # three tiles for four blocks
        (40, 640, 384, Plan(workers=2, stack=1, even=True, depth=64, slots=3), ("nf4", 64)),
    ],
)
def test_the_product_is_the_reference_s_however_it_is_cut(tokens, out, size, plan, kind):
    x, weight, codes = inputs(kind, tokens, out, size)
    plan = dataclasses.replace(plan, blocks=4)
    assert_close(gpu.matmul(x, weight, plan=plan), reference.matmul(x, codes))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "out", "size", "plan"),
    [
        (150, 256, 256, Plan(workers=2, stack=1, tokens=80, depth=64, slots=3)),
        (200, 192, 128, Plan(workers=1, stack=1, tokens=40, band=2, slots=2)),  # bands of two and of one
        # Six pieces: one for each of four blocks, which share the other two.
        (144, 192, 384, Plan(workers=1, stack=1, tokens=80, even=True, depth=64, slots=3)),
    ],
)
def test_more_tokens_are_cut_too(tokens, out, size, plan):
    x, weight, codes = inputs(("int4", 64), tokens, out, size)
    plan = dataclasses.replace(plan, blocks=4)
    assert_close(gpu.matmul(x, weight, plan=plan), reference.matmul(x, codes))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "out", "size", "activation", "kind", "plan"),
    [
        (8, 256, 256, "silu", ("int8", None), Plan(workers=2, stack=2, slots=2)),
        (40, 512, 128, "gelu", ("int4", 64), Plan(workers=2, stack=2, slots=2)),
        (128, 256, 384, "silu", ("mxfp4", 32), Plan(workers=2, stack=2, slots=2)),
        (40, 768, 512, "silu", ("int4", 128), Plan(workers=2, stack=2, even=True, slots=2)),
    ],
)
def test_the_gated_product_is_the_reference_s(tokens, out, size, activation, kind, plan):
    x, weight, codes = inputs(kind, tokens, out, size)
    got = gpu.gated_matmul(x, weight, activation, plan=dataclasses.replace(plan, blocks=4))
    assert_close(got, reference.gated_matmul(x, codes, activation))


@pytest.mark.parametrize("plan", [Plan(workers=2, stack=2, splits=2), Plan(workers=2, stack=1)])
def test_parts_of_sums_are_not_gated_nor_is_a_gate_without_its_up(plan):
    x, weight, _ = inputs(("int4", 128), 8, 256, 256)
    with pytest.raises(AssertionError, match="gates parts of sums, or without an up"):
        gpu.gated_matmul(x, weight, "silu", plan=plan)


@pytest.mark.usefixtures("simulator")
def test_columns_of_x_are_taken_in_the_weight_s_order():
    x, _, codes = inputs(("int4", 128), 8, 64, 256)
    codes = dataclasses.replace(codes, order=jnp.asarray(np.random.default_rng(1).permutation(256), jnp.int32))
    got = gpu.matmul(x, gpu_layout.pack(codes), plan=Plan(workers=1, stack=1, slots=2))
    assert_close(got, reference.matmul(x, codes))


@pytest.mark.usefixtures("simulator")
def test_columns_of_a_share_are_taken_from_a_wider_x():
    """Devices that share a weight with an order have all of `x` each. Its own columns, not those of `x`, are planned:
    22 tiles would be cut in two, which 11 cannot."""
    _, _, codes = inputs(("int4", 128), 8, 64, 11 * 128)
    order = np.random.default_rng(1).permutation(22 * 128)[: 11 * 128]
    codes = dataclasses.replace(codes, order=jnp.asarray(order, jnp.int32))
    x = normal(0, 8, 22 * 128)
    assert gpu_plan.plan_for(8, 64, 22 * 128).splits == 2
    assert_close(gpu.matmul(x, gpu_layout.pack(codes)), reference.matmul(x, codes))


@pytest.mark.usefixtures("simulator")
def test_parts_are_float32_and_one_part_is_what_was_asked_for():
    x, weight, codes = inputs(("int8", None), 3, 64, 256)
    one = gpu.parts(x, weight, dtype=jnp.dtype(jnp.float32), plan=Plan(workers=1, stack=1, slots=2))
    assert (one.shape, one.dtype) == ((1, 8, 64), jnp.float32)
    np.testing.assert_allclose(
        one[0, :3], reference.matmul(x, codes, dtype=jnp.dtype(jnp.float32)), rtol=1e-4, atol=1e-4
    )
    two = gpu.parts(x, weight, plan=Plan(workers=1, stack=1, splits=2, slots=2))
    assert (two.shape, two.dtype) == ((2, 8, 64), jnp.float32)


def test_nothing_but_the_weight_is_read_before_the_kernel_in_front_has_ended(simulator):
    fresh = 77.0
    _, weight, _ = inputs(("int4", 128), 8, 128, 256)
    gpu.matmul(jnp.full((8, 256), fresh, jnp.bfloat16), weight, plan=Plan(workers=1, stack=1, slots=2, blocks=2))
    assert simulator, "it reads something early"
    assert not any((np.asarray(values, np.float32) == fresh).any() for values in simulator)


@pytest.mark.parametrize(("name", "kind"), PLANNED)
def test_a_plan_covers_its_shape_and_fits_a_block(name, kind):
    out, size = SHAPES[name]
    weight = jax.eval_shape(gpu_layout.pack, shaped(kind, out, size))
    for tokens in (1, 8, 16, 64, 128, 129, 256, 300, 512, 2048, 8192):
        if tokens > gpu.MAX_TOKENS:
            plans = [gpu_plan.plan_for_many(tokens, out, size)]
        else:
            plans = [gpu_plan.plan_for(tokens, out, size, gated=gated) for gated in (False, True)]
        for plan in plans:
            assert out % plan.rows == 0
            assert size % (128 * plan.splits) == 0
            assert (tokens if plan.tokens is None else plan.tokens) <= gpu_plan.BF16.most_tokens
            assert plan.splits == 1 or not plan.even
            # A slot has a barrier, and a block no more than so many of those.
            assert 3 <= gpu_plan.ring_slots(tokens, weight, plan) <= 32, plan


def test_only_what_the_kernel_does_is_taken():
    x, weight, codes = inputs(("int4", 128), 8, 192, 256)
    assert gpu.supports(x, weight)
    assert not gpu.supports(x.astype(jnp.float32), weight)
    assert not gpu.supports(x, weight, activation="silu")  # three tiles have no halves
    assert not gpu.supports(jnp.zeros((129, 256), jnp.bfloat16), weight)
    assert not gpu.supports(x, plain.pack(codes))
    experts = jax.tree.map(lambda each: each[None], weight)
    assert not gpu.supports(x, experts)
    _, weight, _ = inputs(("int4", 128), 8, 256, 256)
    assert gpu.supports(x, weight, activation="gelu")
    assert not gpu.supports(x, weight, activation="clamped_silu")
