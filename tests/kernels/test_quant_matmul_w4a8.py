"""Weights of 4 bits with tokens in 8 bits on Hopper: their layout, the decoder's instructions as numbers, and the
products in a simulator that looks for races."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels import chain, hopper
from hex_llm.kernels.matmul.add_norm_gpu import add_norm
from hex_llm.kernels.matmul.reference import total
from hex_llm.kernels.paged_attention.gpu_decode import DecodePlan
from hex_llm.kernels.paged_attention.gpu_decode_merge_rows import merge_rows
from hex_llm.kernels.quant_matmul import (
    api,
    gpu,
    gpu_plan,
    gpu_rows,
    gpu_w4a8_decode,
    gpu_w4a8_layout,
    gpu_w4a8_multiply,
    gpu_w4a8_zeros,
    layouts,
    plain,
    reference,
)
from hex_llm.kernels.quant_matmul.gpu_plan import Plan
from hex_llm.kernels.quant_matmul.gpu_w4a8_layout import LARGEST_ZERO, SMALLER
from hex_llm.kernels.quant_matmul.rows import TILES, EightBits, Rows, sums_shape, taken_by
from hex_llm.kernels.quant_matmul.weight import Codes, Packed
from hex_llm.kernels.rms import Rms
from hex_llm.layers.linear import linear, linear_parts
from hex_llm.layers.mlp import gated_hidden
from hex_llm.layers.norm import Stream, add_rms_norm
from tests.kernels.numbers import normal
from tests.kernels.simulator import simulation
from tests.kernels.test_gpu_lowering import array, lowered
from tests.kernels.test_merge_rows import sizes_for
from tests.kernels.test_quant_matmul_gpu import SHAPES

F32 = jnp.dtype(jnp.float32)


def weight_of(group: int | None, shape: tuple[int, int], *, seed: int = 0) -> Codes:
    random = np.random.default_rng(seed)
    per_group = shape[0], 1 if group is None else shape[1] // group
    scale = jnp.asarray(random.uniform(0.5, 2, per_group) / 40, jnp.bfloat16).astype(jnp.float32)
    return Codes(
        codes=jnp.asarray(random.integers(0, 16, shape, np.uint8)),
        scale=scale,
        zero=jnp.asarray(random.integers(0, 17, per_group), jnp.float32),
        order=None,
        input_scale=None,
        coding="w4a8",
    )


@pytest.mark.parametrize("group", [None, 128, 256])
@pytest.mark.parametrize("has_zero", [False, True])
def test_what_is_packed_comes_back(group, has_zero):
    codes = weight_of(group, (192, 512))
    if not has_zero:
        codes = dataclasses.replace(codes, zero=None)
    packed = jax.jit(gpu_w4a8_layout.pack)(codes)
    assert packed.shape == codes.shape
    got = jax.jit(layouts.unpack)(packed)
    assert (got.codes == codes.codes).all()
    assert (reference.dequantize(got) == reference.dequantize(codes)).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_scales_of_checkpoints_and_every_zero_are_kept_exactly(dtype):
    """The smallest and largest that files have, too: scales share their word with the zero."""
    tiny, largest = jnp.finfo(dtype).smallest_subnormal, min(float(jnp.finfo(dtype).max), 2.0**100)
    scale = np.geomspace(max(float(tiny), 2.0**-116), largest, 64 * 17).astype(dtype).astype(np.float32)
    codes = weight_of(128, (64, 17 * 128))
    zero = np.arange(64 * 17).reshape(64, 17) % 17
    codes = dataclasses.replace(codes, scale=jnp.asarray(scale.reshape(64, 17)), zero=jnp.asarray(zero, jnp.float32))
    got = gpu_w4a8_layout.unpack(gpu_w4a8_layout.pack(codes))
    np.testing.assert_array_equal(got.scale, codes.scale)
    np.testing.assert_array_equal(got.zero, codes.zero)


@pytest.mark.parametrize("zero", [np.nan, np.inf, -3.0, 1e9])
def test_zeros_that_no_checkpoint_has_do_not_change_a_scale(zero):
    codes = weight_of(128, (64, 256))
    got = gpu_w4a8_layout.unpack(gpu_w4a8_layout.pack(dataclasses.replace(codes, zero=codes.zero.at[3, 1].set(zero))))
    want = codes.scale.at[3, 1].set(np.nan) if np.isnan(zero) else codes.scale
    np.testing.assert_array_equal(got.scale, want)
    zeros = np.asarray(got.zero)
    assert ((zeros >= 0) & (zeros <= LARGEST_ZERO)).all()


def test_a_block_of_a_packed_weight_is_that_block_packed():
    codes = weight_of(128, (128, 1024))
    part = dataclasses.replace(
        codes, codes=codes.codes[64:, 512:], scale=codes.scale[64:, 4:], zero=codes.zero[64:, 4:]
    )
    whole, want = gpu_w4a8_layout.pack(codes), gpu_w4a8_layout.pack(part)
    assert (whole.data[1:, 4:] == want.data).all()
    assert (whole.scale[1:, 4:] == want.scale).all()


@pytest.mark.parametrize(("shape", "group"), [((96, 128), 128), ((64, 192), 64), ((64, 256), 64), ((64, 384), 96)])
def test_other_shapes_and_groups_are_refused_by_name(shape, group):
    codes = weight_of(group, shape)
    assert not gpu_w4a8_layout.supports(codes)
    with pytest.raises(ValueError, match=str(shape[1] // group)):
        gpu_w4a8_layout.pack(codes)


def test_weights_with_an_order_and_experts_and_other_codings_do_not_lie_so():
    codes = weight_of(128, (64, 256))
    assert gpu_w4a8_layout.supports(codes)
    assert not gpu_w4a8_layout.supports(dataclasses.replace(codes, order=jnp.arange(256)))
    assert not gpu_w4a8_layout.supports(dataclasses.replace(codes, coding="int4"))
    assert not gpu_w4a8_layout.supports(jax.tree.map(lambda each: each[None], codes))


def test_every_code_is_a_number_of_the_tensor_cores_as_it_is():
    every = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(every.view(jnp.float8_e4m3fn).astype(np.float32) * SMALLER, every)
    assert LARGEST_ZERO >= 16  # one more than the largest code: checkpoints of GPTQ have it


def tiled_as(layout: mgpu.TiledLayout, values: np.ndarray) -> np.ndarray:
    """By Mosaic's own words for a layout: tiles of tiles, of which some dimensions are warps and lanes."""
    for tile in layout.tiling.tiles:
        kept, cut = values.shape[: -len(tile)], values.shape[-len(tile) :]
        parts = [each for size, part in zip(cut, tile, strict=True) for each in (size // part, part)]
        axes = [len(kept) + 2 * i + j for j in (0, 1) for i in range(len(tile))]
        values = values.reshape(*kept, *parts).transpose(*range(len(kept)), *axes)
    return values


def test_threads_have_the_codes_that_their_registers_are_for():
    codes = weight_of(None, (64, 128))
    layout = mgpu.WGMMA_LAYOUT_8BIT
    tiled = tiled_as(layout, np.asarray(codes.codes))
    threads = [int(each) % tiled.ndim for each in (*layout.warp_dims, *layout.lane_dims)]  # pyright: ignore[reportArgumentType]
    rest = [each for each in range(tiled.ndim - 1) if each not in threads]
    want = tiled.transpose(*threads, *rest, tiled.ndim - 1).reshape(128, -1, 4)  # thread, register, byte

    words = np.asarray(gpu_w4a8_layout.pack(codes).data).reshape(-1, 128, 4)  # each thread loads twice 16 bytes
    words = words.swapaxes(0, 1).reshape(128, -1, 1).view(np.uint8)
    got = np.stack([words & 15, words >> 4], axis=2).reshape(128, -1, 4)
    np.testing.assert_array_equal(got, want)


def rows_of_warps(layout: mgpu.TiledLayout, rows: np.ndarray) -> list[set[int]]:
    tiled = tiled_as(layout, rows)
    (warps,) = layout.warp_dims
    return [set(each.flat) for each in np.moveaxis(tiled, int(warps), 0)]  # pyright: ignore[reportArgumentType]


def test_a_warp_leaves_the_zeros_of_the_rows_that_it_reads():
    written = rows_of_warps(gpu_w4a8_multiply.ROWS.to_mgpu(), np.arange(64))
    read = rows_of_warps(gpu_w4a8_zeros.LAYOUT.to_mgpu(), np.broadcast_to(np.arange(64)[:, None], (64, TILES)))
    assert written == read == [set(range(first, first + 16)) for first in (0, 16, 32, 48)]


def test_a_word_s_low_and_high_halves_are_two_registers(monkeypatch):
    """What `decode` asks of the machine, done on numbers."""
    monkeypatch.setattr(gpu_w4a8_decode.mgpu.utils, "c", lambda value, _: value)
    monkeypatch.setattr(gpu_w4a8_decode.arith, "andi", lambda a, b: a & b)
    monkeypatch.setattr(gpu_w4a8_decode.arith, "shrui", lambda a, b: a >> b)
    with gpu_w4a8_decode.ir.Context():
        low, high = gpu_w4a8_decode._halves(0xFEDCBA98)
    assert (low, high) == (0x0E0C0A08, 0x0F0D0B09)


@pytest.fixture
def simulator(monkeypatch):
    """The simulator has no inlined instructions: codes are decoded as `unpack` does."""

    def decode(words):
        plgpu.commit_smem()
        codes = gpu_w4a8_layout.unpack_codes(words[None, None])
        return (codes.astype(jnp.float32) / SMALLER).astype(jnp.float8_e4m3fn)

    def blank(shape):
        return plgpu.layout_cast(jnp.zeros(shape, F32), plgpu.Layout.WGMMA)

    monkeypatch.setattr(gpu_w4a8_multiply, "blank", blank)
    monkeypatch.setattr(gpu_w4a8_zeros, "await_own_warp", lambda _: plgpu.commit_smem())
    monkeypatch.setattr(gpu_w4a8_decode, "decode", decode)
    with simulation(all_phases=True) as early_reads:
        yield early_reads


def inputs(tokens: int, out: int, size: int, group: int | None = 128) -> tuple[jax.Array, Packed, Codes]:
    codes = weight_of(group, (out, size), seed=out + size)
    return normal(tokens + out + size, tokens, size), gpu_w4a8_layout.pack(codes), codes


def assert_close(got: jax.Array, want: jax.Array) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    wide = [np.asarray(each, np.float64) for each in (got, want)]
    limit = 5e-3 if got.dtype == jnp.bfloat16 else 2e-5
    assert np.linalg.norm(wide[0] - wide[1]) / np.linalg.norm(wide[1]) < limit


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "out", "size", "group", "plan"),
    [
        (1, 384, 256, 128, Plan(workers=1, stack=1, slots=3)),  # six tiles on four blocks
        (3, 640, 384, 128, Plan(workers=2, stack=1, slots=4)),  # the ring is not a whole number of pieces
        (24, 256, 256, None, Plan(workers=2, stack=2, slots=2)),  # one scale for a row
        (40, 256, 512, 256, Plan(workers=1, stack=2, slots=3)),  # groups of two tiles
        (16, 128, 512, 128, Plan(workers=1, stack=1, splits=2)),  # the ring is never full
        (40, 256, 512, 128, Plan(workers=2, stack=1, splits=4, slots=2)),  # four parts to be added
        (72, 256, 256, 128, Plan(workers=2, stack=2, slots=2)),  # both at a time
        (128, 256, 128, 128, Plan(workers=2, stack=2, slots=2)),  # one at a time
        (8, 192, 512, 128, Plan(workers=1, stack=1, even=True, slots=3)),  # three pieces on four blocks
        (100, 320, 512, 128, Plan(workers=1, stack=1, even=True, slots=3)),  # one of five is shared by four
        (104, 128, 640, 128, Plan(workers=2, stack=1, slots=3)),  # two slots at a time, and one
        (8, 64, 4352, 128, Plan(workers=1, stack=1, slots=2)),  # 34 tiles, of which zeros are subtracted 16 at a time
        (8, 64, 4352, 128, Plan(workers=1, stack=1, splits=2, slots=3)),  # 17 each
        (8, 192, 2816, 128, Plan(workers=1, stack=1, even=True, slots=4)),  # shares that begin anywhere in a row
        (40, 640, 512, 128, Plan(workers=2, stack=1, even=True, slots=3)),
        (8, 320, 2816, 128, Plan(workers=1, stack=1, even=True, slots=4)),
    ],
)
def test_the_product_is_the_reference_s_however_it_is_cut(tokens, out, size, group, plan):
    x, weight, codes = inputs(tokens, out, size, group)
    got = gpu.matmul(x, weight, dtype=F32, plan=dataclasses.replace(plan, blocks=4))
    assert_close(got, reference.matmul(x, codes, dtype=F32))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "out", "size", "plan"),
    [
        (150, 256, 256, Plan(workers=2, stack=1, tokens=80, slots=3)),
        (200, 192, 128, Plan(workers=1, stack=1, tokens=40, band=2, slots=2)),  # bands of two and of one
        (144, 192, 384, Plan(workers=1, stack=1, tokens=80, even=True, slots=3)),
        (300, 256, 256, Plan(workers=2, stack=1, tokens=192, slots=3)),
        (200, 512, 256, Plan(workers=2, stack=2, tokens=96, even=True, slots=2)),
    ],
)
def test_more_tokens_are_cut_too(tokens, out, size, plan):
    x, weight, codes = inputs(tokens, out, size)
    got = gpu.matmul(x, weight, dtype=F32, plan=dataclasses.replace(plan, blocks=4))
    assert_close(got, reference.matmul(x, codes, dtype=F32))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "out", "size", "activation", "plan"),
    [
        (8, 256, 256, "silu", Plan(workers=2, stack=2, slots=2)),
        (40, 768, 512, "gelu", Plan(workers=2, stack=2, even=True, slots=2)),
        (100, 512, 128, "silu", Plan(workers=2, stack=2, slots=2)),
        (128, 256, 384, "silu", Plan(workers=1, stack=2, slots=2)),
    ],
)
def test_the_gated_product_is_the_reference_s(tokens, out, size, activation, plan):
    x, weight, codes = inputs(tokens, out, size)
    got = gpu.gated_matmul(x, weight, activation, plan=dataclasses.replace(plan, blocks=4))
    assert_close(got, reference.gated_matmul(x, codes, activation))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(("size", "has_sums"), [(256, False), (1024, True)])
def test_tokens_that_come_in_8_bits_are_taken_as_they_are(size, has_sums):
    x, weight, codes = inputs(5, 128, size)
    rows = gpu_rows.quantize(x, taken_by(weight))
    assert rows.values.shape[0] > 5  # padded
    assert (rows.sums is not None) == has_sums
    plan = Plan(workers=1, stack=1, slots=2, blocks=2)
    got = gpu.parts(rows, weight, dtype=F32, plan=plan)[0, :5]
    assert_close(got, reference.matmul(x, codes, dtype=F32))


@pytest.mark.usefixtures("simulator")
def test_one_token_that_is_no_number_spoils_no_other():
    x, weight, codes = inputs(4, 64, 256)
    plan = Plan(workers=1, stack=1, slots=2, blocks=1)
    got = gpu.matmul(x.at[2, 7].set(jnp.nan), weight, dtype=F32, plan=plan)
    assert jnp.isnan(got[2]).all()
    others = jnp.asarray([0, 1, 3])
    assert_close(got[others], reference.matmul(x, codes, dtype=F32)[others])


def test_nothing_but_the_weight_is_read_before_the_kernel_in_front_has_ended(simulator):
    fresh = 72.0  # a number in 8 bits, too
    _, weight, _ = inputs(8, 128, 256)
    values = jnp.full((8, 256), fresh, jnp.float8_e4m3fn)
    sums = jnp.full(sums_shape(8, 256), 128 * fresh, jnp.bfloat16)
    rows = Rows(values, jnp.full((8,), fresh, jnp.float32), "bfloat16", sums)
    gpu.parts(rows, weight, plan=Plan(workers=1, stack=1, slots=2, blocks=2))
    assert simulator, "it reads something early"
    for values in simulator:
        values = np.asarray(values)
        assert not (values.astype(np.float32) == fresh).any()
        assert not (values.astype(np.float32) == fresh * 128).any()  # what a token's numbers of a tile add up to


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(hopper, "SMS", 3)


@pytest.mark.usefixtures("on_gpu", "simulator")
@pytest.mark.parametrize(("tokens", "padded"), [(3, 8), (70, 72)])
@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_a_norm_for_a_weight_of_4_bits_comes_in_8_with_sums_and_is_multiplied_so(tokens, padded, input_scale):
    codes = weight_of(128, (256, 512))
    codes = dataclasses.replace(codes, input_scale=None if input_scale is None else jnp.float32(input_scale))
    weight, norm = layouts.pack(codes), jnp.linspace(0.5, 2, 512, dtype=jnp.bfloat16)
    assert weight.layout == "hopper8"
    stream = Stream(normal(1, tokens, 512), normal(9, 2, padded, 512, dtype=jnp.float32))
    _, rows = add_rms_norm(stream, norm, Rms(1e-5), behind=weight)
    _, normed = add_rms_norm(stream, norm, Rms(1e-5))
    assert isinstance(rows, Rows)
    assert rows.sums is not None
    assert rows.shape == (padded, 512)
    for got, want in (
        (total(linear_parts(rows, weight)).astype(jnp.bfloat16), reference.matmul(normed, codes)),
        (gated_hidden(rows, weight, activation="silu"), reference.gated_matmul(normed, codes, "silu")),
        # What no kernel of a chain does is multiplied, too.
        (gated_hidden(rows, weight, activation="clamped_silu"), reference.gated_matmul(normed, codes, "clamped_silu")),
        (linear(normed, weight), reference.matmul(normed, codes)),
    ):
        got, want = (np.asarray(each[:tokens], np.float32) for each in (got, want))
        np.testing.assert_allclose(got, want, atol=2**-6 * np.abs(want).max())


@pytest.mark.usefixtures("on_gpu", "simulator")
def test_more_tokens_than_a_chain_has_are_multiplied_by_the_kernel_too():
    codes = weight_of(128, (64, 128))
    x, weight = normal(3, 130, 128), layouts.pack(codes)
    assert not api.takes(x, weight)
    assert_close(api.matmul(x, weight, dtype=F32), reference.matmul(x, codes, dtype=F32))


@pytest.mark.parametrize("name", SHAPES)
def test_a_plan_covers_its_shape_and_fits_a_block(name):
    out, size = SHAPES[name]
    groups = out, size // 128
    codes = Codes(
        array(out, size, dtype=jnp.uint8), array(*groups, dtype=F32), array(*groups, dtype=F32), None, None, "w4a8"
    )
    weight = jax.eval_shape(gpu_w4a8_layout.pack, codes)
    for tokens in (1, 8, 16, 64, 65, 128, 129, 300, 2048, 8192):
        if tokens > 128:
            plans = [gpu_plan.plan_for_many(tokens, out, size, pace=gpu_plan.FP8)]
        else:
            plans = [gpu_plan.plan_for(tokens, out, size, pace=gpu_plan.FP8, gated=gated) for gated in (False, True)]
        for plan in plans:
            assert out % plan.rows == 0
            assert size % (128 * plan.splits) == 0
            assert plan.depth == 128
            assert plan.splits == 1 or not plan.even
            width = plan.tokens or tokens
            assert plan.tokens is None or plan.tokens == chain.padded(width) <= gpu_plan.FP8.most_tokens
            assert 3 <= gpu_plan.ring_slots(tokens, weight, plan) <= 32, plan


@pytest.mark.parametrize(
    ("tokens", "plan", "activation"),
    [
        (64, Plan(workers=2, stack=2), "silu"),
        (128, Plan(workers=2, stack=2, even=True), "silu"),
        (8, Plan(workers=2, stack=1, splits=4), None),
        (40, Plan(workers=1, stack=1), None),
        (120, Plan(workers=2, stack=1), None),
    ],
)
def test_the_product_is_lowered_however_it_is_cut(tokens, plan, activation, monkeypatch):
    numbered, number = [], mgpu.FragmentedArray.broadcasted_iota
    barriers, barrier = [], mgpu.utils.warp_barrier

    def broadcasted_iota(dtype, shape, dimension, layout=None, **more):
        numbered.append(layout)
        return number(dtype, shape, dimension, layout, **more)

    def warp_barrier():
        barriers.append(barrier())

    monkeypatch.setattr(mgpu.FragmentedArray, "broadcasted_iota", broadcasted_iota)
    monkeypatch.setattr(mgpu.utils, "warp_barrier", warp_barrier)
    scales = array(1024, 8, dtype=F32)
    codes = Codes(array(1024, 1024, dtype=jnp.uint8), scales, scales, None, None, "w4a8")
    weight = jax.eval_shape(gpu_w4a8_layout.pack, codes)
    x = array(tokens, 1024, dtype=jnp.bfloat16)
    text = lowered(lambda x, weight: gpu.parts(x, weight, plan=plan, activation=activation), x, weight)
    assert text.count("@mosaic_gpu_v2") == 2  # tokens to 8 bits, and the product
    assert barriers  # between what a warp leaves of zeros and reads again
    # Mosaic counts on from a register's first number along the last axis, wherever the next one is.
    assert numbered
    assert all(layout.tiling.tiles[-1][layout.vector_dim :] == (2,) for layout in numbered)


@pytest.mark.parametrize("width", [512, 4096, 8192, 16384])
def test_a_norm_that_comes_with_sums_is_lowered(width):
    def norm(x, pieces, weight):
        return add_norm(x, pieces, weight, Rms(1e-5), eight_bits=EightBits(None, "float8_e4m3fn", with_sums=True))

    x, weight = array(72, width, dtype=jnp.bfloat16), array(width, dtype=jnp.bfloat16)
    text = lowered(norm, x, array(2, 72, width, dtype=F32), weight)
    assert text.count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize(("seqs", "rows"), [(8, 8), (70, 72), (128, 128)])
def test_merged_attention_that_comes_with_sums_is_lowered(seqs, rows):
    sizes = sizes_for(seqs, 8, 4, 128)

    def merge(averages, exponents, queue):
        plan = DecodePlan(queue, jnp.zeros((1, 2), jnp.int32))
        how = EightBits(None, "float8_e4m3fn", with_sums=True)
        return merge_rows(averages, exponents, plan, sizes, rows, None, how)

    parts = sizes.rows, sizes.max_chunks
    text = lowered(merge, array(*parts, 4, 128, dtype=F32), array(*parts, 64, dtype=F32), array(seqs + 1, 4))
    assert text.count("@mosaic_gpu_v2") == 1


def test_only_what_the_kernel_does_is_taken():
    x, weight, codes = inputs(8, 192, 256)
    assert gpu.supports(x, weight)
    assert not gpu.supports(x.astype(jnp.float32), weight)
    assert not gpu.supports(x, weight, activation="silu")  # three tiles have no halves
    assert not gpu.supports(jnp.zeros((129, 256), jnp.bfloat16), weight)
    assert not gpu.supports(x, plain.pack(codes))
    _, weight, _ = inputs(8, 256, 256)
    assert gpu.supports(x, weight, activation="gelu")
    assert not gpu.supports(x, weight, activation="clamped_silu")
