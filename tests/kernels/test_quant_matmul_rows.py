"""Products on Hopper where tokens and weights are in 8 bits, and tokens brought to those, against the reference in a
simulator that looks for races."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.matmul import add_norm_gpu
from hex_llm.kernels.matmul import gpu as matmul_gpu
from hex_llm.kernels.matmul import reference as matmul_reference
from hex_llm.kernels.matmul.gpu import Plan
from hex_llm.kernels.quant_matmul import api, gpu_eight_bits, gpu_rows, plain, reference, xla_rows
from hex_llm.kernels.quant_matmul.rows import TYPES, EightBits, Rows, sums_shape, taken_by
from hex_llm.kernels.quant_matmul.weight import Codes, Coding, Packed
from hex_llm.kernels.rms import Rms
from hex_llm.layers.linear import linear, linear_parts
from hex_llm.layers.mlp import gated_hidden
from hex_llm.layers.norm import Stream, add_rms_norm
from tests.kernels.numbers import normal
from tests.kernels.simulator import simulation

FP8 = EightBits(None, "float8_e4m3fn")
CODINGS: tuple[Coding, ...] = ("fp8", "w8a8")
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "down of Llama-3.3-70B": (8192, 28672),
}


@pytest.fixture
def simulator():
    """A block of a product leaves no barrier before all that was to arrive has arrived."""
    with simulation(all_phases=True):
        yield


def tokens_of(tokens: int, size: int) -> jax.Array:
    """Of which each has numbers of a size of its own, so that a scale in the wrong place shows."""
    sizes = jnp.exp2(jnp.arange(tokens) % 7 - 3).astype(jnp.bfloat16)
    return normal(tokens + size, tokens, size) * sizes[:, None]


def weight_of(coding: Coding, out: int, size: int, input_scale: float | None = None) -> Codes:
    how = EightBits(None, TYPES[coding])
    codes = (112 if coding == "fp8" else 32) * normal(out, out, size, dtype=jnp.float32)
    return Codes(
        codes=how.rounded(how.within(codes)),
        scale=jnp.exp2(-10 - jnp.arange(out) % 5).astype(jnp.float32)[:, None],
        zero=None,
        order=None,
        input_scale=None if input_scale is None else jnp.float32(input_scale),
        coding=coding,
    )


def packed(codes: Codes) -> Packed:
    """As it lies on a GPU; on a CPU, numbers are bytes."""
    return dataclasses.replace(plain.pack(codes), data=codes.codes)


def assert_close(got: jax.Array, want: jax.Array) -> None:
    """Equal but for the last bit, and for what a sum of another order loses where its terms cancel each other."""
    assert got.dtype == want.dtype
    want = want.astype(jnp.float32)
    largest = jnp.max(jnp.abs(want), axis=1, keepdims=True)
    np.testing.assert_allclose(got.astype(jnp.float32) / largest, want / largest, rtol=2**-7, atol=1e-5)


def product(x: jax.Array | Rows, codes: Codes, plan: Plan, count: int) -> jax.Array:
    plan = dataclasses.replace(plan, blocks=4)
    return matmul_reference.total(gpu_eight_bits.parts(x, packed(codes), plan=plan))[:count].astype(x.dtype)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "out", "size", "plan", "input_scale"),
    [
        (8, 128, 256, Plan(rows=64, depth=128, slots=2), None),
        (8, 128, 256, Plan(rows=64, depth=128, slots=2), 0.01),
        (1, 384, 256, Plan(rows=64, depth=128, slots=3), None),  # six tiles on four blocks
        (24, 256, 512, Plan(rows=128, depth=256, slots=2), 0.01),
        (16, 128, 1024, Plan(rows=64, depth=128, splits=2, slots=2), None),
        (40, 256, 512, Plan(rows=128, depth=128, splits=4, slots=2), 0.01),  # four parts to be added
        (40, 256, 512, Plan(rows=128, depth=128, splits=4, slots=2), None),
        (128, 256, 256, Plan(rows=256, depth=128, slots=2), 0.01),
    ],
)
@pytest.mark.parametrize("coding", CODINGS)
def test_the_product_is_the_reference_s(coding, tokens, out, size, plan, input_scale):
    x, codes = tokens_of(tokens, size), weight_of(coding, out, size, input_scale)
    assert_close(product(x, codes, plan, tokens), reference.matmul(x, codes))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "out", "size", "activation"),
    [(8, 256, 256, "silu"), (40, 512, 128, "gelu"), (128, 256, 384, "silu")],
)
@pytest.mark.parametrize("coding", CODINGS)
def test_the_gated_product_is_the_reference_s(coding, tokens, out, size, activation):
    x, codes = tokens_of(tokens, size), weight_of(coding, out, size)
    plan = Plan(rows=128, depth=128, slots=2, blocks=4)
    got = gpu_eight_bits.parts(x, packed(codes), plan=plan, activation=activation)[0, :tokens]
    assert_close(got, reference.gated_matmul(x, codes, activation))


@pytest.mark.usefixtures("simulator")
def test_sums_of_whole_numbers_are_exact():
    x, codes = tokens_of(40, 512), weight_of("w8a8", 128, 512)
    plan = Plan(rows=64, depth=128, slots=2, blocks=2)
    float32 = jnp.dtype(jnp.float32)
    got = gpu_eight_bits.parts(x, packed(codes), plan=plan, dtype=float32)[0]
    assert got.shape == (48, 128)  # the tensor cores do not multiply 40 rows of them
    np.testing.assert_allclose(got[:40], reference.matmul(x, codes, dtype=float32), rtol=3e-7)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("coding", CODINGS)
def test_tokens_that_are_there_in_8_bits_are_taken_as_they_are(coding):
    x, codes = tokens_of(8, 256), weight_of(coding, 128, 256)
    plan = Plan(rows=64, depth=128, slots=2)
    rows = gpu_rows.quantize(x, taken_by(codes))
    assert (product(rows, codes, plan, 8) == product(x, codes, plan, 8)).all()


@pytest.mark.usefixtures("simulator")
def test_logits_are_left_in_float32():
    x, codes = tokens_of(8, 128), weight_of("fp8", 128, 128)
    plan = Plan(rows=64, depth=128, slots=2, blocks=4)
    float32 = jnp.dtype(jnp.float32)
    got = gpu_eight_bits.parts(x, packed(codes), plan=plan, dtype=float32)[0]
    np.testing.assert_allclose(got, reference.matmul(x, codes, dtype=float32), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("width", [256, 1152, 4096, 28672])  # the last one is read in two pieces
@pytest.mark.parametrize("input_scale", [None, 0.01])
@pytest.mark.parametrize("coding", CODINGS)
def test_rows_in_8_bits_are_the_reference_s(coding, width, input_scale):
    x = tokens_of(3, width).at[1].set(0).at[2, 5].set(-1000)
    how = EightBits(None if input_scale is None else jnp.float32(input_scale), TYPES[coding])
    got = gpu_rows.quantize(x, how)
    values, scale = reference.quantize_rows(x, how)
    assert got.values.dtype == values.dtype == how.dtype
    assert (got.shape, got.scale.shape, got.dtype) == ((8, width), (8,), x.dtype)
    np.testing.assert_array_equal(got.values[:3].astype(jnp.float32), values.astype(jnp.float32))
    np.testing.assert_array_equal(got.scale[:3], scale[:, 0])
    assert not got.values[3:].astype(jnp.float32).any()


@pytest.mark.usefixtures("simulator")
def test_as_many_rows_come_in_8_bits_as_are_wanted():
    x = tokens_of(3, 512)
    how = EightBits(None, "float8_e4m3fn", with_sums=True)
    got, some = gpu_rows.quantize(x, how, rows=19), gpu_rows.quantize(x, how)
    assert some.sums is not None
    assert got.sums is not None
    assert (got.shape, got.scale.shape, got.sums.shape) == ((19, 512), (19,), sums_shape(19, 512))
    assert (np.asarray(got.values)[:8] == np.asarray(some.values)).all()
    assert (got.sums[:, :8] == some.sums).all()
    assert not np.asarray(got.values)[8:].astype(np.float32).any()
    assert not got.sums[:, 8:].any()


def assert_sums_are_of_the_values(rows: Rows) -> None:
    """As a number and what is left of it, and zeros past the last."""
    sums = np.asarray(rows.values, np.float32).reshape(len(rows.values), -1, 128).sum(axis=2)
    first, rest = np.asarray(rows.sums, np.float32)
    np.testing.assert_allclose((first + rest)[:, : sums.shape[1]], sums, rtol=2**-17)
    np.testing.assert_allclose(first[:, : sums.shape[1]], sums, rtol=2**-8)
    assert not first[:, sums.shape[1] :].any()
    assert not rest[:, sums.shape[1] :].any()


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(("width", "has_sums"), [(512, True), (4096, True), (28672, True), (640, False)])
@pytest.mark.parametrize("input_scale", [None, 0.01])
def test_rows_come_with_the_sums_of_their_tiles_where_warps_have_as_many(width, has_sums, input_scale):
    x = tokens_of(3, width).at[1].set(0).at[2, 5].set(-1000)
    given = None if input_scale is None else jnp.float32(input_scale)
    got = gpu_rows.quantize(x, EightBits(given, "float8_e4m3fn", with_sums=True))
    want = gpu_rows.quantize(x, EightBits(given, "float8_e4m3fn"))
    assert want.sums is None
    assert (np.asarray(got.values) == np.asarray(want.values)).all()
    assert (got.scale == want.scale).all()
    assert (got.sums is not None) == has_sums
    if has_sums:
        assert got.sums.shape == sums_shape(8, width)
        assert_sums_are_of_the_values(got)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("input_scale", [None, 0.05])
@pytest.mark.parametrize("rms", [Rms(1e-5), Rms(1e-5, plus_one=True)])
@pytest.mark.parametrize("width", [1024, 2048, 4096])  # that one, two and four warpgroups have
def test_a_norm_comes_with_the_sums_of_its_tiles(width, rms, input_scale):
    tokens = 3
    x, pieces = tokens_of(tokens, width), normal(9, 2, tokens, width, dtype=jnp.float32)
    weight, inner = (jnp.linspace(first, 2, width, dtype=jnp.bfloat16) for first in (0.5, 1.5))
    given = None if input_scale is None else jnp.float32(input_scale)
    y, rows = add_norm_gpu.add_norm(
        x, pieces, weight, rms, inner=inner, eight_bits=EightBits(given, "float8_e4m3fn", with_sums=True)
    )
    want, normed = matmul_reference.add_norm(x, pieces, weight, rms, inner=inner)
    _, scale = reference.quantize_rows(normed, EightBits(given, "float8_e4m3fn"))
    assert isinstance(rows, Rows)
    assert (rows.shape, rows.sums.shape) == ((8, width), sums_shape(8, width))
    np.testing.assert_allclose(y.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-7)
    np.testing.assert_allclose(rows.scale[:tokens], scale[:, 0], rtol=2**-7)
    got = rows.values[:tokens].astype(jnp.float32) * rows.scale[:tokens, None]
    np.testing.assert_allclose(got, normed.astype(jnp.float32), rtol=2**-3, atol=2**-6)
    assert_sums_are_of_the_values(rows)


def test_tiny_rows_and_zeros_have_scales_that_can_be_divided_by():
    x = jnp.asarray([[0.0, 0.0], [1e-38, -1e-39], [448.0, 1.0]], jnp.float32)
    values, scale = reference.quantize_rows(x, FP8)
    np.testing.assert_array_equal(scale[:, 0], [1, 1, 1])
    np.testing.assert_array_equal(values.astype(jnp.float32), [[0, 0], [0, 0], [448, 1]])


@pytest.mark.parametrize("none", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("coding", CODINGS)
def test_a_token_with_what_is_no_number_has_a_product_of_none(coding, none):
    """int8 has no NaN, and the engine looks for it among logits."""
    x, codes = tokens_of(5, 256).at[1, 7].set(none).at[2, 255].set(none), weight_of(coding, 64, 256)
    for got in (
        reference.matmul(x, codes),
        jax.jit(api.matmul, static_argnames="dtype")(x, plain.pack(codes), dtype=x.dtype),
    ):
        np.testing.assert_array_equal(jnp.isfinite(got).all(axis=1), [True, False, False, True, True])
        assert not jnp.isfinite(got[1:3]).any()


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("width", [256, 28672])
@pytest.mark.parametrize("coding", CODINGS)
def test_the_scale_of_a_token_tells_that_it_has_what_is_no_number(coding, width):
    x = tokens_of(3, width).at[1, 7].set(jnp.nan).at[2, width - 1].set(jnp.inf)
    got = gpu_rows.quantize(x, EightBits(None, TYPES[coding]))
    np.testing.assert_array_equal(jnp.isfinite(got.scale[:3]), [True, False, False])


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(("width", "input_scale"), [(1024, None), (1152, None), (512, 0.02), (4096, None)])
@pytest.mark.parametrize("coding", CODINGS)
def test_a_norm_in_8_bits_is_the_reference_s(coding, width, input_scale):
    x, pieces = tokens_of(3, width), normal(9, 2, 3, width, dtype=jnp.float32)
    weight = jnp.linspace(0.5, 2, width, dtype=jnp.bfloat16)
    how = EightBits(None if input_scale is None else jnp.float32(input_scale), TYPES[coding])
    y, rows = add_norm_gpu.add_norm(x, pieces, weight, Rms(1e-5), eight_bits=how)
    want, normed = matmul_reference.add_norm(x, pieces, weight, Rms(1e-5))
    values, scale = reference.quantize_rows(normed, how)
    assert isinstance(rows, Rows)
    assert (rows.shape, rows.dtype) == ((8, width), x.dtype)
    np.testing.assert_array_equal(y.astype(jnp.float32), want.astype(jnp.float32))
    np.testing.assert_allclose(rows.scale[:3], scale[:, 0], rtol=2**-7)
    # The norm's own last bit may move a number over the middle between two of the few that there are.
    step = 1 if coding == "w8a8" else 2**-9
    np.testing.assert_allclose(rows.values[:3].astype(jnp.float32), values.astype(jnp.float32), rtol=2**-3, atol=step)
    assert (rows.values[:3] == values).mean() > 0.9
    assert not rows.values[3:].astype(jnp.float32).any()


@pytest.mark.parametrize("coding", CODINGS)
def test_many_tokens_are_multiplied_as_the_reference_says(coding):
    x, codes = tokens_of(40, 256), weight_of(coding, 128, 256)
    values, scale = reference.quantize_rows(x, taken_by(codes))
    rows = Rows(values, scale[:, 0], "bfloat16")
    got = xla_rows.matmul(rows, packed(codes), dtype=jnp.dtype(jnp.bfloat16))
    want = reference.matmul(x, codes)
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-6)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64, 128])
def test_a_plan_covers_its_shape_and_fits_a_block(name, tokens):
    out, size = SHAPES[name]
    for gated in (False, True):
        plan = matmul_gpu.plan_for(tokens, out, size, gated=gated, dtype=jnp.int8)
        assert out % plan.rows == 0
        assert plan.depth % matmul_gpu.line(jnp.int8) == 0
        assert size % (plan.depth * plan.splits) == 0
        assert matmul_gpu.ring_slots(tokens, plan, jnp.int8) >= 4


def test_what_the_kernel_does_not_do_is_not_taken():
    def supports(tokens=8, out=128, size=256, *, x_type=jnp.bfloat16, activation=None, **changes):
        weight = Packed(
            data=jax.ShapeDtypeStruct((out, size), jnp.int8), scale=jax.ShapeDtypeStruct((out, 1), jnp.float32),
            zero=None, order=None, input_scale=None, coding="w8a8", layout="plain",
        )  # fmt: skip
        weight = dataclasses.replace(weight, **changes)
        return gpu_eight_bits.supports(jax.ShapeDtypeStruct((tokens, size), x_type), weight, activation=activation)

    assert supports()
    assert supports(coding="fp8", data=jax.ShapeDtypeStruct((128, 256), FP8.dtype))
    assert supports(activation="silu")
    assert not supports(tokens=129)
    assert not supports(size=192)
    assert not supports(out=96)
    assert not supports(out=192, activation="silu")
    assert not supports(activation="clamped_silu")
    assert not supports(x_type=jnp.float32)
    assert not supports(coding="int8")
    assert not supports(order=jnp.arange(256, dtype=jnp.int32))


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("on_gpu", "simulator")
@pytest.mark.parametrize("coding", CODINGS)
def test_a_norm_for_a_weight_in_8_bits_comes_in_those_and_is_multiplied_so(coding):
    x, codes = tokens_of(3, 256), weight_of(coding, 256, 256)
    weight, scale = packed(codes), jnp.linspace(0.5, 2, 256, dtype=jnp.bfloat16)
    stream = Stream(x, normal(9, 2, 8, 256, dtype=jnp.float32))
    y, rows = add_rms_norm(stream, scale, Rms(1e-5), behind=weight)
    _, normed = add_rms_norm(stream, scale, Rms(1e-5))
    assert isinstance(rows, Rows)
    assert isinstance(normed, jax.Array)
    assert y.shape == (3, 256)
    for got, want in (
        (matmul_reference.total(linear_parts(rows, weight)).astype(x.dtype), reference.matmul(normed, codes)),
        (gated_hidden(rows, weight, activation="silu"), reference.gated_matmul(normed, codes, "silu")),
        # What no kernel of a chain does is multiplied, too.
        (gated_hidden(rows, weight, activation="clamped_silu"), reference.gated_matmul(normed, codes, "clamped_silu")),
        (linear(rows, weight, scale), reference.matmul(normed, codes) + scale[None]),
    ):
        assert got.shape == (8, want.shape[1])
        assert got.dtype == want.dtype
        largest = jnp.max(jnp.abs(want[:3])).astype(jnp.float32)
        np.testing.assert_allclose(
            got[:3].astype(jnp.float32) / largest, want[:3].astype(jnp.float32) / largest, atol=2**-6
        )


@pytest.mark.usefixtures("on_gpu", "simulator")
@pytest.mark.parametrize("coding", CODINGS)
def test_more_tokens_than_a_chain_has_come_in_8_bits_from_the_kernel_and_are_multiplied_by_xla(coding):
    x, codes = tokens_of(130, 128), weight_of(coding, 64, 128, 0.01)
    weight = packed(codes)
    assert not api.takes(x, weight)
    float32 = jnp.dtype(jnp.float32)
    got, want = api.matmul(x, weight, dtype=float32), reference.matmul(x, codes, dtype=float32)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("coding", CODINGS)
def test_only_a_weight_that_multiplies_8_bits_wants_tokens_in_those(coding):
    x, weight = tokens_of(8, 256), packed(weight_of(coding, 128, 256, 0.01))
    assert api.rows_for(x, weight) == EightBits(weight.input_scale, TYPES[coding])
    assert api.rows_for(x, jnp.zeros((128, 256), jnp.bfloat16)) is None
    assert api.rows_for(x, dataclasses.replace(weight, coding="int8")) is None
    assert api.rows_for(tokens_of(129, 256), weight) is None


def test_on_other_machines_tokens_stay_as_they_are():
    x, weight = tokens_of(8, 256), packed(weight_of("w8a8", 128, 256))
    assert api.rows_for(x, weight) is None
    assert not api.takes(x, weight)
