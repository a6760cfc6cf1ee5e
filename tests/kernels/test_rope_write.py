"""The GPU's rotation and write of queries, keys and values against the reference, in Pallas's simulator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention import gpu_key_order
from hex_llm.kernels.paged_attention.gpu_decode_sizes import multiplied_dtype
from hex_llm.kernels.paged_attention.gpu_key_order import KeyOrdered, in_key_order
from hex_llm.kernels.paged_attention.pages import rounded, value
from hex_llm.kernels.rms import Rms, rms_norm
from hex_llm.kernels.rope_write import api, gpu, reference

BF16, FP8, INT8 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8)
PAGES, PAGE_SIZE = 6, 8
Q, K = slice(0, 4), slice(4, 6)  # heads of queries and of keys, where there are 4 and 2


def inputs(num_tokens, *, heads=4, kv_heads=2, head_dim=64, parts=1, rows=None, pages_dtype=jnp.bfloat16):
    rng = np.random.default_rng(num_tokens + heads + parts)
    width = (heads + 2 * kv_heads) * head_dim
    dtype = jnp.float32 if parts > 1 else jnp.bfloat16
    qkv = jnp.asarray(rng.standard_normal((parts, rows or num_tokens, width)), dtype)
    angles = jnp.asarray(rng.uniform(0, 6, (num_tokens, 1, head_dim // 2)), jnp.float32)
    pages = rounded(jnp.asarray(rng.standard_normal((PAGES, 2, kv_heads, PAGE_SIZE, head_dim))), pages_dtype)
    places = jnp.asarray(rng.permutation(PAGES * PAGE_SIZE)[:num_tokens], jnp.int32)
    unused = jnp.zeros(0, jnp.int32)
    batch = Batch(
        tokens=unused,
        positions=unused,
        write_page=places // PAGE_SIZE,
        write_offset=places % PAGE_SIZE,
        cu_q=None,
        kv_len=unused,
        page_table=unused,
        num_decode=None,
        num_seqs=unused,
    )
    return qkv, (jnp.cos(angles), jnp.sin(angles)), pages, batch


def options(qkv, head_dim, *, bias=False, norms=False, plus_one=False):
    """What a family adds: a bias on all heads, or a norm of each."""
    rng = np.random.default_rng(7)
    given = {}
    if bias:
        given["bias"] = jnp.asarray(3 * rng.standard_normal(qkv.shape[2]), jnp.bfloat16)
    if norms:
        given["norms"] = tuple(jnp.asarray(rng.standard_normal(head_dim), jnp.bfloat16) for _ in range(2))
        given["rms"] = Rms(1e-6, plus_one)
    return given


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("shape", "family"),
    [
        ({"num_tokens": 3, "heads": 8, "kv_heads": 4, "head_dim": 128, "parts": 2}, {}),
        ({"num_tokens": 1, "rows": 8, "parts": 3}, {}),
        ({"num_tokens": 5, "heads": 3, "kv_heads": 1}, {}),
        ({"num_tokens": 2, "heads": 4, "kv_heads": 4, "head_dim": 256}, {}),
        ({"num_tokens": 2, "heads": 6, "kv_heads": 2, "head_dim": 96}, {}),
        ({"num_tokens": 3, "heads": 7, "kv_heads": 1, "parts": 2}, {"bias": True}),
        ({"num_tokens": 3, "heads": 8, "kv_heads": 4, "head_dim": 128, "parts": 2}, {"norms": True}),
        ({"num_tokens": 2, "heads": 4, "kv_heads": 1, "head_dim": 256}, {"norms": True, "plus_one": True}),
        ({"num_tokens": 2, "heads": 4, "kv_heads": 2, "head_dim": 96}, {"bias": True, "norms": True}),
        ({"num_tokens": 2, "parts": 2}, {"rotated": False}),
        ({"num_tokens": 2, "parts": 2}, {"rotated": False, "bias": True, "norms": True}),
        ({"num_tokens": 3, "heads": 8, "kv_heads": 4, "head_dim": 128, "pages_dtype": FP8}, {}),
        ({"num_tokens": 2, "parts": 2, "pages_dtype": FP8}, {"bias": True}),
        ({"num_tokens": 3, "heads": 8, "kv_heads": 4, "head_dim": 128, "pages_dtype": INT8}, {"norms": True}),
        ({"num_tokens": 2, "heads": 3, "kv_heads": 1, "head_dim": 96, "parts": 2, "pages_dtype": INT8}, {}),
    ],
    ids=[
        "parts",
        "one-token-of-eight-rows",
        "odd-heads",
        "wide-heads",
        "heads-of-96",
        "bias",
        "norms",
        "norms-plus-one",
        "bias-and-norms-of-96",
        "not-rotated",
        "normed-and-not-rotated",
        "fp8",
        "fp8-heads-of-64",
        "int8",
        "int8-heads-of-96",
    ],
)
def test_queries_and_pages_are_the_reference_s(shape, family):
    qkv, tables, pages, batch = inputs(**shape)
    tables = tables if family.pop("rotated", True) else None
    given = options(qkv, pages.shape[4], **family)
    want = reference.rope_write(qkv, tables, pages, batch, BF16, **given)
    got = gpu.rope_write(qkv, tables, pages, batch.write_page, batch.write_offset, BF16, **given)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        # Multiplied and added in one rounding or in two: the last bit may differ.
        last_bit = 2**-3 if mine.dtype == FP8 else 2**-7
        whole = 1 if mine.dtype == INT8 else 1e-6
        np.testing.assert_allclose(mine.astype(jnp.float32), theirs.astype(jnp.float32), rtol=last_bit, atol=whole)
    changed = np.asarray((value(got[1]) != value(pages)).any(axis=(1, 2, 4)))
    assert changed.sum() == shape["num_tokens"]
    assert changed[batch.write_page, batch.write_offset].all()


def test_the_reference_writes_keys_turned_and_values_as_they_are():
    qkv, tables, pages, batch = inputs(3, parts=2)
    q, written = reference.rope_write(qkv, tables, pages, batch, BF16)
    heads = qkv.sum(0).astype(BF16).reshape(3, 8, 64)
    np.testing.assert_array_equal(q, reference.rotate(heads[:, :4], tables))
    places = value(written)[batch.write_page, :, :, batch.write_offset]
    np.testing.assert_array_equal(places[:, 0], reference.rotate(heads[:, 4:6], tables))
    np.testing.assert_array_equal(places[:, 1], heads[:, 6:])


def test_the_reference_adds_the_bias_and_normalises_heads_before_it_turns_them_but_no_values():
    qkv, tables, pages, batch = inputs(3, parts=2)
    given = options(qkv, 64, bias=True, norms=True)
    q, written = reference.rope_write(qkv, tables, pages, batch, BF16, **given)
    heads = (qkv.sum(0) + given["bias"].astype(jnp.float32)[None]).astype(BF16).reshape(3, 8, 64)
    queries, keys = (rms_norm(heads[:, part], given["norms"][i], Rms(1e-6)) for i, part in enumerate([Q, K]))
    np.testing.assert_array_equal(q, reference.rotate(queries, tables))
    places = value(written)[batch.write_page, :, :, batch.write_offset]
    np.testing.assert_array_equal(places[:, 0], reference.rotate(keys, tables))
    np.testing.assert_array_equal(places[:, 1], heads[:, 6:])
    q, written = reference.rope_write(qkv, None, pages, batch, BF16, **given)
    np.testing.assert_array_equal(q, queries)
    np.testing.assert_array_equal(value(written)[batch.write_page, 0, :, batch.write_offset], keys)


@pytest.mark.parametrize(("head_dim", "dtype"), [(80, jnp.bfloat16), (64, jnp.float32)])
def test_shapes_and_types_that_the_kernel_does_not_do_go_the_plain_way(monkeypatch, head_dim, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    qkv, tables, pages, batch = inputs(2, head_dim=head_dim, pages_dtype=dtype)
    assert not gpu.supports(qkv, pages, BF16)
    given = options(qkv, head_dim, bias=True, norms=True)
    got = api.rope_write(qkv, tables, pages, batch, BF16, **given)
    for mine, theirs in zip(got, reference.rope_write(qkv, tables, pages, batch, BF16, **given), strict=True):
        np.testing.assert_array_equal(mine.astype(jnp.float32), theirs.astype(jnp.float32))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(("head_dim", "pages_dtype"), [(128, FP8), (64, FP8), (128, INT8), (256, FP8)])
def test_queries_of_decodes_meet_keys_in_8_bits_in_their_order(monkeypatch, head_dim, pages_dtype):
    # What the names of lanes mean is `test_key_order`'s; here the numbers are moved.
    monkeypatch.setattr(gpu_key_order, "layout", lambda rows, columns, **_: gpu.warp_per_row(rows, columns))
    monkeypatch.setattr(gpu_key_order, "renamed", lambda values, *_: in_key_order(values))
    qkv, tables, pages, batch = inputs(3, heads=8, kv_heads=4, head_dim=head_dim, parts=2, pages_dtype=pages_dtype)
    given = options(qkv, head_dim, norms=True)
    places = batch.write_page, batch.write_offset
    want, written = gpu.rope_write(qkv, tables, pages, *places, BF16, **given)
    got, pages = gpu.rope_write(qkv, tables, pages, *places, BF16, **given, decode=True)
    assert isinstance(got, KeyOrdered)
    assert (got.values.dtype, got.dtype) == (multiplied_dtype(pages_dtype), BF16)
    np.testing.assert_array_equal(got.values, in_key_order(want.astype(got.values.dtype)))
    for mine, theirs in zip(jax.tree.leaves(pages), jax.tree.leaves(written), strict=True):
        np.testing.assert_array_equal(mine.astype(jnp.float32), theirs.astype(jnp.float32))
