"""Partial attention that is merged and brought to 8 bits by one kernel, against the two that do these one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.paged_attention.gpu_decode import DEFAULT, DecodePlan
from hex_llm.kernels.paged_attention.gpu_decode_merge import merge
from hex_llm.kernels.paged_attention.gpu_decode_merge_rows import merge_rows, supports
from hex_llm.kernels.paged_attention.gpu_decode_sizes import sizes_of
from hex_llm.kernels.quant_matmul import reference
from hex_llm.kernels.quant_matmul.rows import EightBits
from tests.kernels.test_quant_matmul_rows import assert_sums_are_of_the_values

BF16 = jnp.bfloat16
CHUNKS = (1, 0, 3)  # of each sequence


def sizes_for(seqs, kv_heads, group, head_dim):
    q = jax.ShapeDtypeStruct((seqs, kv_heads * group, head_dim), BF16)
    return sizes_of(q, jax.ShapeDtypeStruct((9, 2, kv_heads, 16, head_dim), BF16), DEFAULT)


def partial_results(sizes, seed):
    rng = np.random.default_rng(seed)
    shape = sizes.rows, sizes.max_chunks
    averages = jnp.asarray(rng.standard_normal((*shape, sizes.group, sizes.head_dim)), jnp.float32)
    exponents = jnp.asarray(4 * rng.standard_normal((*shape, 64)), jnp.float32)
    sequences = jnp.asarray([[9, 0, 1, count] for count in CHUNKS], jnp.int32)
    return averages, exponents, DecodePlan(sequences, jnp.zeros((1, 2), jnp.int32))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("type_name", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "has_sinks", "given"),
    [(2, 4, 64, False, None), (1, 8, 128, True, None), (2, 4, 128, False, 0.01), (1, 4, 256, False, None)],
)
def test_tokens_are_those_of_merging_and_then_rounding(kv_heads, group, head_dim, has_sinks, given, type_name):
    sizes = sizes_for(len(CHUNKS), kv_heads, group, head_dim)
    averages, exponents, plan = partial_results(sizes, group)
    sinks = jnp.linspace(-2, 3, kv_heads * group).astype(BF16) if has_sinks else None
    how = EightBits(None if given is None else jnp.float32(given), type_name)
    merged = merge(averages, exponents, plan, sizes, 8, sinks).reshape(8, -1)
    values, scale = reference.quantize_rows(merged, how)
    got = merge_rows(averages, exponents, plan, sizes, 8, sinks, how)
    np.testing.assert_allclose(got.scale, scale[:, 0], rtol=2**-7)
    # A last bit of a merged number may differ, and so the number of 8 bits next to it.
    near = 1.001 if type_name == "int8" else np.maximum(np.abs(np.asarray(values, np.float32)), 2**-6) / 8
    assert (np.abs(np.asarray(got.values, np.float32) - np.asarray(values, np.float32)) <= near).all()
    assert (np.asarray(got.values) == np.asarray(values)).mean() > 0.98
    assert not np.asarray(got.values, np.float32)[[1, *range(3, 8)]].any()
    assert np.asarray(got.values, np.float32)[[0, 2]].any(axis=1).all()


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_that_are_tiles_come_with_their_sums(head_dim):
    sizes = sizes_for(len(CHUNKS), 2, 4, head_dim)
    averages, exponents, plan = partial_results(sizes, 4)
    want = merge_rows(averages, exponents, plan, sizes, 8, None, EightBits(None, "float8_e4m3fn"))
    got = merge_rows(averages, exponents, plan, sizes, 8, None, EightBits(None, "float8_e4m3fn", with_sums=True))
    assert (np.asarray(got.values) == np.asarray(want.values)).all()
    assert want.sums is None
    if head_dim == 64:
        assert got.sums is None
    else:
        assert_sums_are_of_the_values(got)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("type_name", ["float8_e4m3fn", "int8"])
def test_what_is_no_number_is_told_by_the_scale_of_its_token_alone(type_name):
    sizes = sizes_for(len(CHUNKS), 2, 4, 64)
    averages, exponents, plan = partial_results(sizes, 1)
    averages = averages.at[4, 0, 1, 3].set(jnp.nan)  # of the third sequence
    got = merge_rows(averages, exponents, plan, sizes, 3, None, EightBits(None, type_name))
    assert np.isfinite(np.asarray(got.scale)).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("seqs", "kv_heads", "group", "head_dim", "does"),
    [
        (64, 8, 4, 128, True),
        (64, 8, 8, 128, True),
        (64, 8, 4, 64, True),
        (8, 8, 4, 128, False),  # few rows of many chunks
        (64, 4, 7, 128, False),  # neighbours are of two rows
        (64, 8, 4, 96, False),
        (64, 16, 8, 128, False),  # more than registers hold
    ],
)
def test_what_it_does(seqs, kv_heads, group, head_dim, does):
    assert supports(sizes_for(seqs, kv_heads, group, head_dim)) == does
