"""Products with weights in few bits on TPUs against the reference, in Pallas' interpreter of TPU kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.grouped_matmul import api as grouped_api
from hex_llm.kernels.grouped_matmul import reference as grouped_reference
from hex_llm.kernels.quant_matmul import api, layouts, reference, tpu, tpu_layout, tpu_sizes
from hex_llm.kernels.quant_matmul.weight import Codes, Coding
from hex_llm.parallel.backend import compiling_for
from tests.kernels.test_grouped_matmul import choices

BF16, F32 = jnp.bfloat16, jnp.float32
# (coding, columns of a group or None for a row, zeros)
KINDS: tuple[tuple[Coding, int | None, bool], ...] = (
    ("int8", None, False),
    ("int8", 128, True),
    ("int4", None, False),
    ("int4", 32, True),
    ("int4", 64, True),
    ("int4", 128, True),
    ("nf4", 64, False),
    ("fp4", 64, False),
    ("mxfp4", 32, False),
    ("fp8", None, False),
    ("w8a8", None, False),
    ("w4a8", None, True),
    ("w4a8", 128, True),
)


@pytest.fixture(autouse=True)
def _interpreter():
    pltpu.reset_tpu_interpret_mode_state()
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    assert interpreter.races is None or not interpreter.races.races_found
    pltpu.reset_tpu_interpret_mode_state()


def random_codes(rng, coding: Coding, shape: tuple[int, ...], group: int | None, zero: bool) -> Codes:
    *experts, out, size = shape
    match coding:
        case "int8" | "w8a8":
            codes = jnp.asarray(rng.integers(-128, 128, shape), jnp.int8)
        case "fp8":
            codes = jnp.asarray(np.clip(rng.standard_normal(shape) * 100, -448, 448), jnp.float8_e4m3fn)
            codes = jnp.where(jnp.asarray(rng.random(shape) < 0.1), jnp.asarray(-0.0, codes.dtype), codes)
        case _:
            codes = jnp.asarray(rng.integers(0, 16, shape), jnp.uint8)
    groups = (*experts, out, size // group if group else 1)
    scale = np.exp2(rng.integers(-9, -3, groups)) if coding == "mxfp4" else rng.uniform(0.001, 0.1, groups)
    lowest, highest = (-20, 21) if coding == "int8" else (0, 17)
    return Codes(
        codes=codes,
        scale=jnp.asarray(scale, F32),
        zero=jnp.asarray(rng.integers(lowest, highest, groups), F32) if zero else None,
        order=None,
        input_scale=None,
        coding=coding,
    )


@pytest.mark.parametrize(("coding", "group", "zero"), KINDS)
def test_what_is_packed_stands_for_the_same_numbers(rng, coding, group, zero):
    codes = random_codes(rng, coding, (2, 256, 384), group, zero)
    assert tpu_layout.fits(codes)
    packed = jax.jit(tpu_layout.pack)(codes)
    assert packed.shape == codes.shape
    back = jax.jit(tpu_layout.unpack)(packed)
    np.testing.assert_array_equal(reference.dequantize(back), reference.dequantize(codes))


def check(x, codes, wide, monkeypatch, dtype=F32):
    monkeypatch.setattr(tpu, "_only_float32", lambda: wide == F32)
    with compiling_for("tpu"):
        assert jax.eval_shape(layouts.pack, codes).layout == "tpu"
        got = jax.jit(lambda x, codes: api.matmul(x, layouts.pack(codes), dtype=dtype))(x, codes)
    assert got.dtype == dtype
    # Codes, and scales of rows, are not rounded; a weight with a scale of its group is, and where that is computed in
    # bf16, so are the table and the scale.
    step = 2**-8 if dtype == BF16 or wide == BF16 else 2**-9
    exact = codes.scale.shape[-1] == 1 and dtype == F32
    assert_close(got, reference.matmul(x, codes, dtype=F32), 2**-18 if exact else step)


def assert_close(got, want, step):
    error, scale = got.astype(F32) - want, jnp.sqrt(jnp.mean(want * want))
    assert jnp.sqrt(jnp.mean(error * error)) < step * scale
    assert jnp.max(jnp.abs(error)) < 8 * step * scale


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("wide", [F32, BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize(("coding", "group", "zero"), KINDS)
def test_products(rng, monkeypatch, coding, group, zero, wide):
    codes = random_codes(rng, coding, (256, 640), group, zero)
    x = jnp.asarray(rng.standard_normal((8, 640)), BF16)
    check(x, codes, wide, monkeypatch)


@pytest.mark.parametrize("input_scale", [None, 0.02])
@pytest.mark.parametrize("tokens", [8, 40])
def test_whole_numbers_are_multiplied_as_such(rng, monkeypatch, tokens, input_scale):
    small_blocks(monkeypatch)
    monkeypatch.setattr(tpu, "_multiplies_int8", lambda: True)
    codes = random_codes(rng, "w8a8", (256, 640), None, zero=False)
    codes = dataclasses.replace(codes, input_scale=None if input_scale is None else jnp.float32(input_scale))
    x = jnp.asarray(rng.standard_normal((tokens, 640)), BF16)
    with compiling_for("tpu"):
        got = jax.jit(lambda x, codes: api.matmul(x, layouts.pack(codes), dtype=F32))(x, codes)
    # Sums are exact.
    np.testing.assert_allclose(got, reference.matmul(x, codes, dtype=F32), rtol=1e-6)


def small_blocks(monkeypatch):
    """So that there are several of everything at sizes that are fast to look at."""
    monkeypatch.setattr(tpu_sizes, "MOST_TOKENS", 16)
    monkeypatch.setattr(tpu_sizes, "COLUMNS_AT_ONCE", 128)
    monkeypatch.setattr(tpu_sizes, "BLOCK_BYTES", 128 * 256)
    monkeypatch.setattr(tpu_sizes, "TILES_AT_ONCE", (1,))


@pytest.mark.parametrize(("coding", "group", "zero"), [("int8", None, False), ("int4", 64, True), ("mxfp4", 32, False)])
def test_several_blocks_of_tokens_rows_and_columns(rng, monkeypatch, coding, group, zero):
    small_blocks(monkeypatch)
    sizes = tpu_sizes.sizes_of(40, 512, 768, 768 // group if group else 1, coding)
    assert sizes.tokens < 40 / 2
    assert sizes.tiles < 512 // 128
    assert sizes.columns_at_once < sizes.columns < 768
    codes = random_codes(rng, coding, (512, 768), group, zero)
    check(jnp.asarray(rng.standard_normal((40, 768)), BF16), codes, F32, monkeypatch)


@pytest.mark.parametrize(("coding", "group"), [("int4", 64), ("int8", None), ("nf4", 64)])
def test_columns_that_fill_no_whole_tile_of_tokens(rng, monkeypatch, coding, group):
    codes = random_codes(rng, coding, (128, 192), group, zero=False)
    check(jnp.asarray(rng.standard_normal((3, 192)), BF16), codes, F32, monkeypatch)


def test_columns_in_an_order_of_their_own(rng, monkeypatch):
    codes = random_codes(rng, "int4", (128, 256), 128, zero=True)
    codes = dataclasses.replace(codes, order=jnp.asarray(rng.permutation(256), jnp.int32))
    check(jnp.asarray(rng.standard_normal((5, 256)), BF16), codes, F32, monkeypatch)


def test_tokens_are_rounded_as_float8_is(rng):
    every = jnp.arange(256, dtype=jnp.uint8)
    numbers = jax.lax.bitcast_convert_type(every, jnp.float8_e4m3fn).astype(F32)
    numbers = jnp.sort(numbers[jnp.isfinite(numbers)])
    halves = (numbers[1:] + numbers[:-1]) / 2
    near = jnp.asarray(rng.uniform(-448, 448, 1000) * 2.0 ** -rng.integers(0, 20, 1000), F32)
    for values in (numbers, halves, near):
        np.testing.assert_array_equal(tpu._rounded_to_fp8(values), values.astype(jnp.float8_e4m3fn).astype(F32))


def test_tokens_by_a_scale_that_is_given_and_a_result_in_bf16(rng, monkeypatch):
    codes = dataclasses.replace(random_codes(rng, "fp8", (128, 256), None, zero=False), input_scale=jnp.float32(0.01))
    check(jnp.asarray(rng.standard_normal((24, 256)), BF16), codes, BF16, monkeypatch, dtype=BF16)


@pytest.mark.parametrize(
    ("coding", "shape", "group"),
    [
        ("int4", (192, 256), 128),  # rows
        ("int4", (128, 96), 32),  # columns
        ("int8", (128, 96), 8),  # groups
        ("int4", (128, 8 * 576 + 64), None),  # so many columns at once
    ],
)
def test_what_does_not_fit_is_left_as_it_lies(rng, coding, shape, group):
    codes = random_codes(rng, coding, shape, group, zero=False)
    with compiling_for("tpu"):
        packed = layouts.pack(codes)
    assert packed.layout == "plain"
    np.testing.assert_array_equal(layouts.unpack(packed).codes, codes.codes)


@pytest.mark.parametrize(
    ("coding", "group", "zero", "tokens", "k", "num_experts", "among"),
    [
        ("int4", 64, True, 5, 2, 4, None),
        ("mxfp4", 32, False, 70, 2, 3, None),  # several tiles of an expert
        ("fp8", None, False, 20, 1, 5, 2),  # experts that nobody has chosen
    ],
)
def test_experts(rng, monkeypatch, coding, group, zero, tokens, k, num_experts, among):
    monkeypatch.setattr(tpu, "_only_float32", lambda: True)
    small_blocks(monkeypatch)
    width, size = 256, 128
    gate_up = random_codes(rng, coding, (num_experts, 2 * size, width), group, zero)
    down = random_codes(rng, coding, (num_experts, width, size), group, zero)
    x = jnp.asarray(rng.standard_normal((tokens, width)) / 100, BF16)
    bias = jnp.asarray(rng.standard_normal((num_experts, 2 * size)), BF16)
    arrays = bias, *choices(rng, tokens, k, num_experts, among)

    @jax.jit
    def run(x, gate_up, down, bias, *routed):
        return grouped_api.experts(x, layouts.pack(gate_up), bias, layouts.pack(down), *routed, activation="silu")

    with compiling_for("tpu"):
        (got,) = run(x, gate_up, down, *arrays)
    values = [reference.dequantize(each) for each in (gate_up, down)]
    want = grouped_reference.experts(x, values[0], bias, values[1], *arrays[1:], activation="silu")
    # What is between the products is rounded, too; with fp8, to 8 bits.
    assert_close(got, want, 2**-4 if coding == "fp8" else 2**-8)
