"""Products with weights in few bits on TPUs against the reference, in Pallas' interpreter of TPU kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.quant_matmul import reference, tpu, tpu_layout
from hex_llm.kernels.quant_matmul.weight import Codes, Coding

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
        case "int8":
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
    got = jax.jit(lambda x, w: tpu.matmul(x, tpu_layout.pack(w), dtype=dtype))(x, codes)
    assert got.dtype == dtype
    want = reference.matmul(x, codes, dtype=F32)
    error, scale = got.astype(F32) - want, jnp.sqrt(jnp.mean(want * want))
    # Codes, and scales of rows, are not rounded; a weight with a scale of its group is, and where that is computed in
    # bf16, so are the table and the scale.
    step = 2**-8 if dtype == BF16 or wide == BF16 else 2**-9
    if codes.scale.shape[-1] == 1 and dtype == F32:
        step = 2**-18
    assert jnp.sqrt(jnp.mean(error * error)) < step * scale
    assert jnp.max(jnp.abs(error)) < 6 * step * scale


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("wide", [F32, BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize(("coding", "group", "zero"), KINDS)
def test_products(rng, monkeypatch, coding, group, zero, wide):
    codes = random_codes(rng, coding, (256, 640), group, zero)
    x = jnp.asarray(rng.standard_normal((8, 640)), BF16)
    check(x, codes, wide, monkeypatch)
