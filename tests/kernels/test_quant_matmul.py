"""Weights in few bits: the plain layout, and products with it in plain XLA, against the reference."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.quant_matmul import api, layouts, plain, reference, xla
from hex_llm.kernels.quant_matmul.decode import decode
from hex_llm.kernels.quant_matmul.weight import TABLES, Codes, numbers_of, of_expert
from hex_llm.parallel import backend

CODINGS = ("int8", "int4", "nf4", "fp4", "mxfp4", "fp8", "w8a8", "w4a8")


def codes(coding, *shape, group=None, zero=False, order=False, input_scale=None, seed=0):
    """Of a weight [..., out, in] with numbers of about 1; without a group, rows have one scale each."""
    random = np.random.default_rng([seed, *shape])
    *experts, out, size = shape
    scales = (*experts, out, size // (group or size))
    match coding:
        case "int8" | "w8a8":
            values = random.integers(-128, 128, shape).astype(np.int8)
        case "fp8":
            values = np.asarray(random.normal(size=shape) * 30, jnp.float8_e4m3fn)
        case _:
            values = random.integers(0, 16, shape).astype(np.uint8)
    largest = {"int8": 128, "int4": 8, "mxfp4": 6, "fp8": 30}.get(numbers_of(coding), 1)
    return Codes(
        codes=jnp.asarray(values),
        scale=jnp.asarray(random.uniform(0.5, 1.5, scales) / largest, jnp.float32),
        zero=jnp.asarray(random.integers(0, 16, scales), jnp.float32) if zero else None,
        order=jnp.asarray(random.permutation(size), jnp.int32) if order else None,
        input_scale=None if input_scale is None else jnp.asarray(input_scale, jnp.float32),
        coding=coding,
    )


def rows(number, size, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(number).normal(size=(number, size)), dtype)


def assert_close(got, want, dtype):
    """Within what summing in another order does; of bfloat16, also what rounding weights and the result to it does."""
    step = 2**-8 if dtype == jnp.bfloat16 else 2e-6
    want = np.asarray(want, np.float32)
    np.testing.assert_allclose(
        np.asarray(got, np.float32), want, rtol=2 * step, atol=2 * step * np.sqrt(np.mean(want**2))
    )


@pytest.fixture
def small_blocks(monkeypatch):
    """So that small weights have several, too."""
    monkeypatch.setattr(xla, "BLOCK_BYTES", 16 << 10)


@pytest.mark.parametrize("coding", CODINGS)
def test_the_plain_layout_keeps_every_code(coding):
    weight = codes(coding, 3, 5, 128, group=32, zero=numbers_of(coding) == "int4", order=True)
    packed = jax.jit(layouts.pack)(weight)
    assert packed.shape == weight.shape
    assert packed.data.nbytes * (1 if coding in ("int8", "fp8", "w8a8") else 2) == weight.codes.size
    for before, after in zip(jax.tree.leaves(weight), jax.tree.leaves(jax.jit(layouts.unpack)(packed)), strict=True):
        assert before.dtype == after.dtype
        assert (np.asarray(before) == np.asarray(after)).all()


@pytest.mark.parametrize("coding", TABLES)
def test_numbers_of_a_table_are_made_exactly(coding):
    every = jnp.arange(16, dtype=jnp.uint8)
    assert (np.asarray(jax.jit(decode, static_argnums=1)(every, coding)) == TABLES[coding]).all()


def test_numbers_of_fp8_are_made_exactly():
    every = np.arange(256, dtype=np.uint8)
    want = every.view(jnp.float8_e4m3fn).astype(np.float32)
    got = np.asarray(jax.jit(decode, static_argnums=1)(jnp.asarray(every), "fp8"))
    np.testing.assert_array_equal(got, want)  # two of them are no numbers, and equal here
    assert (np.signbit(got) == np.signbit(want)).all()


@pytest.mark.parametrize("input_scale", [None, 0.01])
def test_tokens_and_weights_of_whole_numbers_are_what_numpy_makes_of_them(input_scale):
    weight, x = codes("w8a8", 24, 4096, input_scale=input_scale), rows(5, 4096, jnp.bfloat16)
    wide = np.asarray(x, np.float32)
    own = np.abs(wide).max(axis=1, keepdims=True) / np.float32(127)
    scale = own if input_scale is None else np.float32([[input_scale]])
    tokens = np.clip(np.rint(wide * (1 / scale)), -128, 127).astype(np.int64)
    assert np.abs(tokens).max() == (127 if input_scale is None else 128)
    sums = tokens @ np.asarray(weight.codes, np.int64).T
    want = sums.astype(np.float64) * scale * np.asarray(weight.scale)[:, 0]
    np.testing.assert_allclose(reference.matmul(x, weight, dtype=jnp.dtype(jnp.float32)), want, rtol=3e-7)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_experts_of_whole_numbers_multiply_tokens_as_they_are(platform):
    weight = codes("w8a8", 3, 128, 128, input_scale=0.01)
    with backend.compiling_for(platform):
        experts, one = (jax.eval_shape(layouts.pack, each) for each in (weight, codes("w8a8", 128, 128)))
    assert (experts.coding, experts.input_scale, one.coding) == ("int8", None, "w8a8")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(
    ("shape", "options", "rounds"),
    [
        ((128, 256), {"group": 128}, True),
        ((128, 256), {"group": 256}, True),
        ((128, 256), {"group": 64}, False),  # a sum of a group's own is not worth it
        ((128, 256), {"group": 128, "order": True}, False),
        ((3, 128, 256), {"group": 128}, False),
    ],
    ids=["groups", "rows", "small groups", "order", "experts"],
)
def test_weights_of_4_bits_multiply_tokens_in_8_bits_only_where_groups_are_wide_and_in_order(
    platform, shape, options, rounds
):
    weight = codes("w4a8", *shape, zero=True, input_scale=0.01, **options)
    with backend.compiling_for(platform):
        packed = jax.eval_shape(layouts.pack, weight)
    assert packed.coding == ("w4a8" if rounds else "int4")
    assert (packed.input_scale is not None) == rounds
    assert packed.shape == shape


KINDS = [
    ("int8", None, {}),
    ("int8", 32, {"zero": True}),
    ("int8", 128, {"order": True}),
    ("int4", None, {"zero": True}),
    ("int4", 32, {}),
    ("int4", 64, {"zero": True}),
    ("int4", 128, {"zero": True, "order": True}),
    ("nf4", 64, {}),
    ("nf4", None, {}),
    ("fp4", 64, {}),
    ("mxfp4", 32, {}),
    ("fp8", None, {}),
    ("fp8", None, {"input_scale": 0.01}),
    ("w8a8", None, {}),
    ("w8a8", None, {"input_scale": 0.01}),
    ("w8a8", None, {"order": True}),
    ("w4a8", None, {"zero": True}),
    ("w4a8", 128, {"zero": True}),
    ("w4a8", 128, {"input_scale": 0.01}),
]
# Every kind with every number of rows and in both types, and every number in both types.
PRODUCTS = [
    (*kind, number, (jnp.float32, jnp.bfloat16)[(i + j) % 2])
    for i, kind in enumerate(KINDS)
    for j, number in enumerate((1, 2, 37))
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("coding", "group", "options", "number", "dtype"), PRODUCTS)
def test_products_are_what_the_reference_says(coding, group, options, number, dtype):
    weight = codes(coding, 149, 384, group=group, **options)
    x = rows(number, 384, dtype)
    packed = layouts.pack(weight)
    for result in {dtype, jnp.float32}:
        got = jax.jit(partial(api.matmul, dtype=jnp.dtype(result)))(x, packed)
        assert got.shape == (number, 149)
        assert got.dtype == result
        assert_close(got, reference.matmul(x, weight, dtype=result), dtype)


@pytest.mark.parametrize("coding", ["int8", "int4"])
def test_a_weight_of_one_block_takes_columns_in_its_order(coding):
    """Without blocks, XLA would multiply columns where they were gathered, and has no code for that in bfloat16."""
    weight = codes(coding, 64, 128, group=64, zero=True, order=True)
    x = rows(16, 128, jnp.bfloat16)
    got = jax.jit(partial(xla.matmul, dtype=jnp.dtype(jnp.bfloat16)))(x, layouts.pack(weight))
    assert_close(got, reference.matmul(x, weight), jnp.bfloat16)


@pytest.mark.parametrize("coding", ["int8", "int4", "mxfp4", "fp8", "w8a8", "w4a8"])
def test_a_row_with_one_scale_is_multiplied_exactly(coding):
    """Its codes are exact in bfloat16, so that only the sum is rounded."""
    weight = codes(coding, 64, 256, zero=numbers_of(coding) == "int4")
    x = rows(8, 256, jnp.bfloat16)
    got = xla.matmul(x, layouts.pack(weight), dtype=jnp.dtype(jnp.float32))
    assert_close(got, reference.matmul(x, weight, dtype=jnp.float32), jnp.float32)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("number", [1, 8])
def test_one_expert_of_several_multiplies(coding, number):
    weight = codes(coding, 3, 40, 128, group=None if coding == "fp8" else 32)
    packed, x = layouts.pack(weight), rows(number, 128)
    for expert in range(3):
        alone = of_expert(packed, jnp.asarray(expert))
        want = reference.matmul(x, layouts.unpack(alone))
        assert alone.shape == (40, 128)
        assert (layouts.unpack(alone).codes == weight.codes[expert]).all()
        got = jax.jit(partial(xla.matmul, dtype=jnp.dtype(x.dtype)))(x, packed, expert=jnp.asarray(expert))
        assert_close(got, want, x.dtype)


@cache
def large(coding):
    """Of a weight as large as real ones, what it is like: numbers of that size take seconds to make."""
    group = None if coding == "w8a8" else 128
    return jax.eval_shape(plain.pack, jax.eval_shape(lambda: codes(coding, 8192, 4096, group=group)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("coding", CODINGS)
def test_a_cpu_never_has_the_decoded_matrix_in_memory(coding, number, dtype):
    weight = large(coding)
    x = jax.ShapeDtypeStruct((number, 4096), dtype)
    program = jax.jit(partial(api.matmul, dtype=jnp.dtype(dtype))).lower(x, weight).compile()
    temporaries = program.memory_analysis().temp_size_in_bytes
    assert temporaries < 6 << 20  # decoded, 64 MiB in bfloat16; its codes alone are 16 MiB or 32


@pytest.mark.parametrize("number", [1, 8])
def test_other_machines_get_one_product_without_a_loop(number):
    weight = large("int4")
    x = jax.ShapeDtypeStruct((number, 4096), jnp.bfloat16)
    run = partial(xla.matmul, dtype=jnp.dtype(jnp.bfloat16))
    assert "scan" in str(jax.make_jaxpr(run)(x, weight))
    with backend.compiling_for("gpu"):
        assert "scan" not in str(jax.make_jaxpr(lambda *args: run(*args))(x, weight))
