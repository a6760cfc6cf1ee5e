"""The experts of a layer: every implementation against the reference; the GPU's in a simulator that looks for races."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels import hopper
from hex_llm.kernels.grouped_matmul import api, gpu, gpu_few, gpu_few_plan, gpu_left, gpu_many, reference, xla
from hex_llm.kernels.grouped_matmul.groups import group_rows, most_tiles
from hex_llm.kernels.quant_matmul import layouts
from hex_llm.kernels.quant_matmul.reference import dequantize
from hex_llm.kernels.quant_matmul.rows import TYPES
from hex_llm.kernels.quant_matmul.weight import Codes
from tests.kernels.simulator import simulation
from tests.kernels.test_copy_alignment import alignment_of
from tests.kernels.test_quant_matmul import CODINGS, codes

# (E, k, D, F)
SERVED = {
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "mixtral-8x22b": (8, 2, 6144, 16384),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3-30b-a3b halved": (128, 8, 2048, 384),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "llama-4-scout": (16, 1, 5120, 8192),
}
FEW = (
    gpu_few.Plan(rows=128, depth=64, slots=2, blocks=3),
    gpu_few.Plan(rows=64, depth=64, splits=2, slots=3, blocks=3),
)
MANY = (gpu_many.Plan(rows=64, columns=64, slots=2, blocks=3), gpu_many.Plan(rows=64, columns=32, slots=3, blocks=3))


@pytest.fixture
def simulator():
    """A block leaves no barrier before all that was to arrive has arrived."""
    with simulation(all_phases=True) as early_reads:
        yield early_reads


def choices(random, tokens, k, num_experts, among=None):
    """Different experts for each token, of the first `among`."""
    picked = [random.permutation(among or num_experts)[:k] for _ in range(tokens)]
    return jnp.asarray(np.stack(picked), jnp.int32), jnp.asarray(random.uniform(0.1, 1, (tokens, k)), jnp.float32)


def inputs(tokens, k, num_experts, width, size, *, bias=False, among=None, dtype=jnp.bfloat16, seed=0):
    random = np.random.default_rng([seed, tokens, k, num_experts])

    def normal(*shape, scale=1.0):
        return jnp.asarray(random.normal(size=shape) * scale, dtype)

    return (
        normal(tokens, width),
        normal(num_experts, 2 * size, width, scale=width**-0.5),
        normal(num_experts, 2 * size) if bias else None,
        normal(num_experts, width, size, scale=size**-0.5),
        *choices(random, tokens, k, num_experts, among),
    )


def assert_close(parts, arrays, activation="silu", steps=5):
    """Within what rounding the hidden numbers and the result to bfloat16 does, or float32; weights are more steps."""
    tokens = arrays[4].shape[0]
    want = reference.experts(*arrays, activation=activation)
    got = jnp.sum(parts.astype(jnp.float32), axis=0)[:tokens]
    step = 2**-8 if arrays[0].dtype == jnp.bfloat16 else 1e-6
    scale = float(jnp.sqrt(jnp.mean(want * want)))
    np.testing.assert_allclose(got, want, rtol=2 * step, atol=steps * step * scale)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "k", "num_experts", "bias", "among", "activation"),
    [
        (1, 2, 8, False, None, "silu"),
        (1, 8, 128, False, None, "silu"),
        (5, 1, 4, False, 1, "gelu"),  # one expert has all rows
        (13, 4, 6, True, 5, "clamped_silu"),  # one has none
        (300, 2, 3, False, None, "silu"),  # more than a block that is counted at once
    ],
)
def test_xla_does_what_the_reference_says(tokens, k, num_experts, bias, among, activation, dtype):
    arrays = inputs(tokens, k, num_experts, 24, 40, bias=bias, among=among, dtype=dtype)
    out = jax.jit(xla.experts, static_argnames="activation")(*arrays, activation=activation)
    assert out.shape == (1, tokens, 24)
    assert out.dtype == dtype
    assert_close(out, arrays, activation)


WHOLE_TOKENS = [coding for coding in CODINGS if coding not in TYPES]  # the others' tokens are in 8 bits, too


def few_bits(coding, tokens, *, bias=False, dtype=jnp.float32, input_scale=None):
    """What `inputs` has, with the weights of 4 experts, [192, 128] and [128, 96], in codes of numbers of about 0.1."""
    group = None if coding in ("int8", "fp8") else 32
    x, _, gate_up_bias, _, chosen, share = inputs(tokens, 2, 4, 128, 96, bias=bias, dtype=dtype)
    first, second = (
        codes(coding, *shape, group=group, zero=coding == "int4", input_scale=input_scale)
        for shape in ((4, 192, 128), (4, 128, 96))
    )
    first, second = (replace(weight, scale=weight.scale / 10) for weight in (first, second))
    return x, first, gate_up_bias, second, chosen, share


def packed(arrays):
    return [layouts.pack(each) if isinstance(each, Codes) else each for each in arrays]


# Both numbers of tokens with every coding and in both types, and every coding in both types.
BY_TYPE = [
    (coding, tokens, (jnp.float32, jnp.bfloat16)[(i + j) % 2])
    for i, coding in enumerate(WHOLE_TOKENS)
    for j, tokens in enumerate((1, 11))
]


@pytest.mark.parametrize(("coding", "tokens", "dtype"), BY_TYPE)
def test_xla_does_what_the_reference_says_with_weights_in_few_bits(coding, tokens, dtype):
    arrays = few_bits(coding, tokens, bias=tokens > 1, dtype=dtype)
    out = jax.jit(api.experts, static_argnames="activation")(*packed(arrays), activation="silu")
    assert out.shape == (1, tokens, 128)
    assert out.dtype == dtype
    assert_close(out, arrays, steps=8)


@pytest.mark.parametrize(("dtype", "limit"), [(jnp.float32, 0.01), (jnp.bfloat16, 0.02)])
@pytest.mark.parametrize(("tokens", "input_scale"), [(1, None), (11, 0.01)])
def test_xla_brings_tokens_to_8_bits_where_weights_are_fp8(tokens, input_scale, dtype, limit):
    """A hidden number that has been summed in another order may be rounded to the next one, and there are few."""
    arrays = few_bits("fp8", tokens, dtype=dtype, input_scale=input_scale)
    out = jax.jit(api.experts, static_argnames="activation")(*packed(arrays), activation="silu")[0]
    want = reference.experts(*arrays, activation="silu")
    x, first, bias, second, *routing = arrays
    unrounded = reference.experts(x, dequantize(first), bias, dequantize(second), *routing, activation="silu")

    def distance(result):
        return float(jnp.sqrt(jnp.mean((result.astype(jnp.float32) - want) ** 2) / jnp.mean(want**2)))

    assert distance(out) < limit < distance(unrounded)


@pytest.mark.parametrize("coding", WHOLE_TOKENS)
def test_the_reference_multiplies_by_the_numbers_that_codes_stand_for(coding):
    x, first, bias, second, *routing = few_bits(coding, 5, bias=True)
    got = reference.experts(x, first, bias, second, *routing, activation="gelu")
    want = reference.experts(x, dequantize(first), bias, dequantize(second), *routing, activation="gelu")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_neither_experts_nor_their_numbers_are_copied_on_a_cpu():
    first, second = (
        jax.eval_shape(layouts.pack, jax.eval_shape(lambda shape=shape: codes("int4", *shape, group=128, zero=True)))
        for shape in ((4, 8192, 2048), (4, 2048, 4096))
    )
    x, chosen = jax.ShapeDtypeStruct((1, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((1, 2), jnp.int32)
    share = jax.ShapeDtypeStruct((1, 2), jnp.float32)
    run = jax.jit(functools.partial(xla.experts, activation="silu"))
    program = run.lower(x, first, None, second, chosen, share).compile()
    assert program.memory_analysis().temp_size_in_bytes < 6 << 20  # 8 MiB of codes, 32 of numbers in bfloat16


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "k", "num_experts", "bias", "among", "activation", "plans"),
    [
        (3, 4, 6, True, 4, "clamped_silu", FEW),
        (12, 8, 9, False, None, "gelu", FEW),
        # Two warpgroups each, and a ring that is longer than the work.
        (24, 1, 3, False, 1, "silu", (gpu_few.Plan(256, 128, slots=4, blocks=2), gpu_few.Plan(128, 128, slots=8))),
    ],
)
def test_the_kernel_for_few_tokens_does_what_the_reference_says(tokens, k, num_experts, bias, among, activation, plans):
    arrays = inputs(tokens, k, num_experts, 128, 128, bias=bias, among=among)
    parts = gpu_few.experts(*arrays, activation=activation, plans=plans)
    assert parts.shape == (plans[1].splits, -(-tokens // 8) * 8, 128)
    assert parts.dtype == jnp.float32
    assert_close(parts, arrays, activation)


@pytest.mark.usefixtures("simulator")
def test_a_token_of_few_gets_the_same_bits_whoever_is_beside_it():
    x, gate_up, bias, down, chosen, share = inputs(3, 2, 4, 128, 128)
    chosen = jnp.asarray([[3, 0], [1, 0], [0, 2]], jnp.int32)
    gate_up = gate_up.at[2].set(1e38)  # an expert of its neighbour makes infinity of all, and 0 times that is no number
    together = gpu_few.experts(x, gate_up, bias, down, chosen, share, activation="silu", plans=FEW)
    alone = gpu_few.experts(x[1:2], gate_up, bias, down, chosen[1:2], share[1:2], activation="silu", plans=FEW)
    assert np.isfinite(np.asarray(alone)).all()
    assert (together[:, 1] == alone[:, 0]).all()


def test_nothing_that_the_kernel_in_front_writes_is_read_before_it_has_ended(simulator):
    old, fresh = 3.0, 77.0  # what was there before, and what the kernel in front writes
    which = gpu_few.Touched(jnp.asarray([1, 2, 0], jnp.int32), share=jnp.full((3, 8), fresh, jnp.float32))
    x, weight = jnp.full((8, 128), fresh, jnp.bfloat16), jnp.full((3, 128, 128), fresh, jnp.bfloat16)
    gpu_few.gate_up_product(x, weight, None, which, activation="silu", plan=FEW[0]).block_until_ready()
    assert not simulator, "which experts there are is not known before"
    hidden, weight = jnp.full((2, 8, 128), fresh, jnp.bfloat16), jnp.full((3, 64, 128), old, jnp.bfloat16)
    gpu_few.down_product(hidden, weight, which, plan=FEW[1]).block_until_ready()
    assert any((np.asarray(values, np.float32) == old).any() for values in simulator)
    assert not any((np.asarray(values, np.float32) == fresh).any() for values in simulator)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("tokens", [3, 128, 200, 8192])
def test_copies_begin_where_copies_may(monkeypatch, name, tokens):
    found = []

    def record(function, place):
        def copy(*args, **options):
            found.append(alignment_of(args[place]))
            return function(*args, **options)

        return copy

    for copy, place in (("copy_gmem_to_smem", 1), ("copy_smem_to_gmem", 0)):
        monkeypatch.setattr(plgpu, copy, record(getattr(plgpu, copy), place))
    num_experts, k, width, size = SERVED[name]
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((tokens, width), jnp.bfloat16),
            ((num_experts, 2 * size, width), jnp.bfloat16),
            ((num_experts, 2 * size), jnp.bfloat16),
            ((num_experts, width, size), jnp.bfloat16),
            ((tokens, k), jnp.int32),
            ((tokens, k), jnp.float32),
        )
    ]
    jax.clear_caches()
    out = jax.eval_shape(functools.partial(gpu.experts, activation="silu"), *arrays)
    jax.clear_caches()
    assert out.shape[1:] == (-(-tokens // 8) * 8, width)
    assert found
    assert all(divisor % wanted == 0 for divisor, wanted in found)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "k", "num_experts", "sizes", "bias", "among", "activation", "plans"),
    [
        # Two tiles of one expert, none of another.
        (70, 1, 2, (64, 64), True, 1, "clamped_silu", MANY),
        (40, 4, 6, (128, 128), False, 5, "silu", (gpu_many.Plan(128, 128, slots=3, blocks=2),) * 2),
        # A band has two of the three tiles; results come out in an odd number of pieces.
        (130, 1, 2, (192, 192), False, None, "gelu", (gpu_many.Plan(128, 192, 256, slots=2, blocks=2),) * 2),
        # Two blocks share the weights, or the rows.
    ],
)
def test_the_kernel_for_many_tokens_does_what_the_reference_says(
    tokens, k, num_experts, sizes, bias, among, activation, plans
):
    arrays = inputs(tokens, k, num_experts, *sizes, bias=bias, among=among)
    out = gpu_many.experts(*arrays, activation=activation, plans=plans)
    assert out.shape == (1, tokens, sizes[0])
    assert_close(out, arrays, activation)


@pytest.mark.parametrize(
    ("width", "size"),
    [(128, 256), (256, 192), (720, 180)],  # in whole tiles; with columns that fill none, and neither
)
def test_tpus_do_what_the_reference_says(width, size):
    from hex_llm.kernels.grouped_matmul import tpu

    arrays = inputs(300, 2, 4, width, size, bias=True, among=3)
    assert tpu.supports(arrays[0], arrays[1], arrays[3])
    run = jax.jit(tpu.experts, static_argnames=("activation", "interpret"))
    out = run(*arrays, activation="clamped_silu", interpret=True)
    assert out.shape == (1, 300, width)
    assert_close(out, arrays, "clamped_silu")


@pytest.mark.parametrize("num_experts", [1, 8, 31, 32, 33, 128, 160])
def test_touched_experts_come_in_order_with_their_shares(num_experts):
    random = np.random.default_rng(num_experts)
    for tokens, k in ((1, 1), (3, min(num_experts, 8)), (100, 1)):
        chosen, share = choices(random, tokens, k, num_experts)
        which = jax.jit(gpu_few.touched, static_argnums=2)(chosen, share, num_experts)
        count, *order = np.asarray(which.order).tolist()
        assert len(order) == min(num_experts, tokens * k)
        assert order[:count] == np.unique(chosen).tolist()
        want = np.zeros((num_experts, -(-tokens // 8) * 8), np.float32)
        want[np.asarray(chosen), np.arange(tokens)[:, None]] = share
        assert (np.asarray(which.share) == want).all()


@pytest.mark.parametrize("tile", [1, 8, 64])
@pytest.mark.parametrize(
    ("tokens", "k", "num_experts"), [(1, 1, 1), (1, 8, 128), (7, 3, 4), (128, 2, 8), (1000, 4, 32)]
)
def test_rows_are_grouped_by_expert_in_whole_tiles(tokens, k, num_experts, tile):
    random = np.random.default_rng(tokens)
    chosen, _ = choices(random, tokens, k, num_experts)
    groups = jax.jit(group_rows, static_argnums=(1, 2))(chosen, num_experts, tile)
    expert, token, row = np.asarray(groups.expert), np.asarray(groups.token), np.asarray(groups.row)
    [num_tiles] = np.asarray(groups.num_tiles)
    assert expert.shape == (most_tiles(tokens, k, num_experts, tile),)
    assert (np.asarray(groups.counts) == np.bincount(np.asarray(chosen).ravel(), minlength=num_experts)).all()
    assert num_tiles == (-(-np.asarray(groups.counts) // tile)).sum() <= len(expert)
    assert len(np.unique(row)) == row.size
    assert row.max() < num_tiles * tile
    assert (token[row] == np.arange(tokens)[:, None]).all()
    assert (expert[row // tile] == chosen).all()


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("tokens", [1, 8, 64, 128])
def test_plans_for_few_tokens_cover_the_served_models(name, tokens):
    _, _, width, size = SERVED[name]
    first, second = gpu_few_plan.gate_up_plan(tokens, size, width), gpu_few_plan.down_plan(tokens, size, width)
    assert size % (first.rows // 2) == width % first.depth == 0
    assert width % second.rows == size % (second.depth * second.splits) == 0
    for plan, weights in ((first, 2), (second, 1)):
        left = gpu_left.Plain(weights, plan.rows // weights, plan.depth, jnp.bfloat16)
        assert gpu_few_plan.ring_slots(tokens, plan.slots, left) >= 3
    assert width // second.rows * second.splits >= 0.6 * hopper.SMS


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("tokens", [129, 512, 8192])
def test_plans_for_many_tokens_cover_the_served_models(name, tokens):
    num_experts, k, width, size = SERVED[name]
    rows = gpu_many.tile_rows(tokens * k, num_experts)
    for out, weights in ((size, 2), (width, 1)):
        plan = gpu_many.plan_for(rows, out, weights=weights)
        assert out % (plan.results(weights) * plan.slabs) == 0
        assert plan.ring_slots(weights) >= 3


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(hopper.jax, "default_backend", lambda: "gpu")


def shapes(tokens, width, size, dtype=jnp.bfloat16):
    of = [(tokens, width), (4, 2 * size, width), (4, width, size)]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in of]


@pytest.mark.usefixtures("on_gpu")
def test_hopper_takes_what_its_kernels_do_and_leaves_the_rest_to_xla():
    assert api._implementation(*shapes(8, 128, 192)) is gpu.experts
    for other in (shapes(8, 96, 128), shapes(8, 128, 100), shapes(8, 128, 128, jnp.float32)):
        assert api._implementation(*other) is xla.experts


def test_other_machines_run_what_xla_makes():
    assert api._implementation(*shapes(8, 128, 128)) is xla.experts


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("tokens", "kernel"), [(128, "few"), (129, "many")])
def test_the_number_of_tokens_says_which_kernel(monkeypatch, tokens, kernel):
    for name, module in (("few", gpu_few), ("many", gpu_many)):
        monkeypatch.setattr(module, "experts", lambda *_, name=name, **__: name)
    chosen = jnp.zeros((tokens, 2), jnp.int32)
    x, gate_up, down = shapes(tokens, 128, 128)
    assert api.experts(x, gate_up, None, down, chosen, chosen, activation="silu") == kernel
