"""The experts of a layer with weights in few bits: Hopper's kernels against the reference, in the simulator."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import hopper
from hex_llm.kernels.grouped_matmul import api, gpu, gpu_few, gpu_few_plan, gpu_left, gpu_many_codes, xla
from hex_llm.kernels.grouped_matmul.gpu_few_plan import Plan
from hex_llm.kernels.quant_matmul import gpu_expert_layout, gpu_layout, plain
from hex_llm.kernels.quant_matmul.reference import dequantize
from hex_llm.kernels.quant_matmul.weight import Codes, Coding
from tests.kernels import test_quant_matmul_gpu
from tests.kernels.test_grouped_matmul import SERVED, assert_close, choices

simulator = test_quant_matmul_gpu.simulator
CODINGS: list[tuple[Coding, int | None]] = [
    ("int8", None),
    ("int4", None),
    ("int4", 128),
    ("nf4", 64),
    ("fp4", 64),
    ("mxfp4", 32),
    ("fp8", None),
]
FEW = Plan(rows=128, depth=128, slots=2, blocks=3), Plan(rows=64, depth=128, slots=3, blocks=3)
MANY = tuple(gpu_many_codes.Plan(tokens=8, workers=1, weights=weights, slots=2, blocks=3) for weights in (2, 1))


def weight_of(coding: Coding, group: int | None, shape: tuple[int, ...], seed: int = 0) -> Codes:
    if coding != "fp8":
        return test_quant_matmul_gpu.weight_of(coding, group, shape, seed)
    codes = test_quant_matmul_gpu.weight_of("int8", group, shape, seed)
    return dataclasses.replace(codes, codes=codes.codes.astype(jnp.float8_e4m3fn), coding="fp8")


def rounded(codes: Codes) -> jax.Array:
    """The weight with one rounding for its scales and one for its numbers, as kernels multiply it."""
    scale = codes.scale.astype(jnp.bfloat16).astype(jnp.float32)
    return dequantize(dataclasses.replace(codes, scale=scale)).astype(jnp.bfloat16)


def inputs(coding, group, tokens, k, num_experts, width, size, *, bias=False, among=None):
    """What a kernel gets, and what the reference does."""
    random = np.random.default_rng([tokens, k, num_experts])
    gate_up = weight_of(coding, group, (num_experts, 2 * size, width), seed=1)
    down = weight_of(coding, group, (num_experts, width, size), seed=2)
    x = jnp.asarray(random.normal(size=(tokens, width)) * 0.2, jnp.bfloat16)
    biases = jnp.asarray(random.normal(size=(num_experts, 2 * size)), jnp.bfloat16) if bias else None
    chosen = choices(random, tokens, k, num_experts, among)
    pack = jax.jit(gpu_expert_layout.pack)
    return (
        (x, pack(gate_up), biases, pack(down), *chosen),
        (x, rounded(gate_up), biases, rounded(down), *chosen),
    )


@pytest.mark.parametrize(("coding", "group"), [*CODINGS, ("int4", 256), ("nf4", None), ("int8", 32)])
def test_a_weight_is_the_same_in_whole_tiles(coding, group):
    # (columns of the weight, of its codes); an even number of tiles, where there are many
    sizes = [(128, 128), (512, 512), (192, 256), (2112, 2304)]
    for size, columns in sizes:
        if group is None or size % group == 0:
            codes = weight_of(coding, group, (2, 64, size))
            packed = jax.jit(gpu_expert_layout.pack)(codes)
            assert packed.shape == (2, 64, columns)
            assert gpu_layout.grouping_of(packed) is not None
            got = dequantize(gpu_layout.unpack(packed))
            assert (got[..., :size].astype(jnp.bfloat16) == rounded(codes)).all()
            assert (got[..., size:] == 0).all()


@pytest.mark.parametrize(
    ("coding", "group", "shape"),
    [("int4", 128, (64, 128)), ("int4", 16, (2, 64, 128)), ("int8", None, (2, 96, 128)), ("int8", None, (2, 64, 96))],
)
def test_what_cannot_lie_so_is_refused_by_name(coding, group, shape):
    codes = weight_of(coding, group, shape)
    assert not gpu_expert_layout.supports(codes)
    with pytest.raises(ValueError, match=str(shape[-1])):
        gpu_expert_layout.pack(codes)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(("coding", "group"), CODINGS)
def test_the_kernel_for_few_tokens_takes_every_coding(coding, group):
    given, meant = inputs(coding, group, 3, 2, 3, 128, 128)
    assert_close(gpu_few.experts(*given, activation="silu", plans=FEW), meant)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "k", "num_experts", "sizes", "bias", "among", "activation", "plans"),
    [
        # As gpt-oss: biases, four experts, columns that fill no whole tile, and rows that three warpgroups share. One
        # expert nobody has chosen.
        (
            5, 4, 6, (192, 192), True, 5, "clamped_silu",
            (Plan(384, 128, slots=3, blocks=4), Plan(192, 128, splits=2, slots=2)),
        ),
        # All tokens choose one expert; two warpgroups each, a ring that is longer than the work, and two parts.
        (
            24, 1, 3, (128, 256), False, 1, "silu",
            (Plan(256, 128, slots=4, blocks=2), Plan(128, 128, splits=2, slots=8)),
        ),
        (12, 3, 4, (256, 128), False, None, "gelu", FEW),
    ],
)  # fmt: skip
def test_the_kernel_for_few_tokens_does_what_the_reference_says(
    tokens, k, num_experts, sizes, bias, among, activation, plans
):
    given, meant = inputs("mxfp4", 32, tokens, k, num_experts, *sizes, bias=bias, among=among)
    parts = gpu_few.experts(*given, activation=activation, plans=plans)
    assert parts.shape == (plans[1].splits, -(-tokens // 8) * 8, sizes[0])
    assert_close(parts, meant, activation)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("coding", "group", "tokens", "k", "num_experts", "sizes", "bias", "among", "activation", "plans"),
    [
        ("mxfp4", 32, 13, 4, 6, (192, 192), True, 5, "clamped_silu", MANY),
        # Three warpgroups, and gate and up of some rows each.
        (
            "int4", 64, 9, 2, 3, (192, 192), False, None, "silu",
            tuple(gpu_many_codes.Plan(8, workers=3, weights=weights, slots=2, blocks=3) for weights in (2, 1)),
        ),
        # Two tiles of one expert, none of the other; two warpgroups, which share the rows of a piece.
        (
            "int4", 128, 20, 1, 2, (256, 128), False, 1, "silu",
            (gpu_many_codes.Plan(16, workers=2, slots=3, blocks=2),) * 2,
        ),
        # A band has one of the tiles.
        (
            "int8", None, 20, 2, 2, (128, 128), False, None, "gelu",
            (gpu_many_codes.Plan(8, workers=1, band=8, slots=2, blocks=2),) * 2,
        ),
    ],
)  # fmt: skip
def test_the_kernel_for_many_tokens_does_what_the_reference_says(
    coding, group, tokens, k, num_experts, sizes, bias, among, activation, plans
):
    given, meant = inputs(coding, group, tokens, k, num_experts, *sizes, bias=bias, among=among)
    out = gpu_many_codes.experts(*given, activation=activation, plans=plans)
    assert out.shape == (1, tokens, sizes[0])
    assert_close(out, meant, activation)


@pytest.mark.parametrize(("coding", "group"), [("int8", None), ("mxfp4", 32), ("fp8", None)])
@pytest.mark.parametrize("down_is_plain", [False, True])
def test_xla_takes_what_the_kernels_do_not(coding, group, down_is_plain):
    given, meant = inputs(coding, group, 5, 2, 3, 192, 192, bias=True)
    x, gate_up, bias, down, *routes = given
    if down_is_plain and coding != "fp8":  # tokens are in 8 bits with a plain one of fp8
        down = plain.pack(weight_of(coding, group, (3, 192, 192), seed=2))
    run = jax.jit(xla.experts, static_argnames="activation")
    assert_close(run(x, gate_up, bias, down, *routes, activation="silu"), meant)


def abstract(name, coding, group):
    num_experts, k, width, size = SERVED[name]

    def packed(*shape):
        codes = jax.eval_shape(lambda: weight_of(coding, None, (1, 64, 64)))
        groups = 1 if group is None else shape[2] // group
        codes = dataclasses.replace(
            codes,
            codes=jax.ShapeDtypeStruct(shape, codes.codes.dtype),
            scale=jax.ShapeDtypeStruct((*shape[:2], groups), jnp.float32),
        )
        return jax.eval_shape(gpu_expert_layout.pack, codes)

    return k, packed(num_experts, 2 * size, width), packed(num_experts, width, size)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("coding", "group"), [("int8", None), ("mxfp4", 32)])
def test_plans_cover_the_served_models(name, coding, group):
    k, gate_up, down = abstract(name, coding, group)
    x = jax.ShapeDtypeStruct((1, down.shape[1]), jnp.bfloat16)
    assert gpu.supports(x, gate_up, down)
    for tokens in (1, 8, 64):
        first, second = gpu_few_plan.plans_for(tokens, min(gate_up.shape[0], tokens * k), gate_up, down)
        assert gate_up.shape[1] % first.rows == down.shape[1] % second.rows == 0
        assert down.shape[2] % (second.depth * second.splits) == 0
        for plan, weight, weights in ((first, gate_up, 2), (second, down, 1)):
            left = gpu_left.left_of(weight, weights=weights, rows=plan.rows // weights, depth=plan.depth)
            assert gpu_few_plan.ring_slots(tokens, plan.slots, left) >= 3
        assert down.shape[1] // second.rows * second.splits >= 0.6 * 132
    for tokens in (65, 129, 2048):
        tile = gpu_many_codes.tile_tokens(tokens * k, gate_up.shape[0], gate_up.shape[1] // 2)
        for weight, gated in ((gate_up, True), (down, False)):
            plan = gpu_many_codes.plan_for(tile, weight.shape[1], gated=gated)
            assert weight.shape[1] % plan.rows == 0
            assert gpu_many_codes._ring(weight, plan, jnp.bfloat16).slots >= 3


def test_other_layouts_and_odd_sizes_are_left_to_xla():
    x = jnp.zeros((1, 128), jnp.bfloat16)
    weights = [weight_of("int4", 128, (2, 2 * size, 128)) for size in (128, 96)]
    first, odd = (gpu_expert_layout.pack(each) for each in weights)
    down = gpu_expert_layout.pack(weight_of("int4", 128, (2, 128, 128)))
    assert gpu.supports(x, first, down)
    assert not gpu.supports(x, odd, down)
    assert not gpu.supports(x, first, plain.pack(weight_of("int4", 128, (2, 128, 128))))
    assert not gpu.supports(x, first, jnp.zeros((2, 128, 128), jnp.bfloat16))
    assert not gpu.supports(x.astype(jnp.float32), first, down)


@pytest.mark.parametrize(("tokens", "kernel"), [(64, "few"), (65, "many")])
def test_the_number_of_tokens_says_which_kernel(monkeypatch, tokens, kernel):
    for name, module in (("few", gpu_few), ("many", gpu_many_codes)):
        monkeypatch.setattr(module, "experts", lambda *_, name=name, **__: name)
    given, _ = inputs("int4", 128, tokens, 1, 2, 128, 128)
    monkeypatch.setattr(hopper.jax, "default_backend", lambda: "gpu")
    assert api.experts(*given, activation="silu") == kernel
