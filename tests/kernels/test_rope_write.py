"""The GPU's rotation and write of queries, keys and values against the reference, in Pallas's simulator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.rope_write import api, gpu, reference

BF16 = jnp.dtype(jnp.bfloat16)
PAGES, PAGE_SIZE = 6, 8


def inputs(num_tokens, *, heads=4, kv_heads=2, head_dim=64, parts=1, rows=None, pages_dtype=jnp.bfloat16):
    rng = np.random.default_rng(num_tokens + heads + parts)
    width = (heads + 2 * kv_heads) * head_dim
    dtype = jnp.float32 if parts > 1 else jnp.bfloat16
    qkv = jnp.asarray(rng.standard_normal((parts, rows or num_tokens, width)), dtype)
    angles = jnp.asarray(rng.uniform(0, 6, (num_tokens, 1, head_dim // 2)), jnp.float32)
    pages = jnp.asarray(rng.standard_normal((PAGES, 2, kv_heads, PAGE_SIZE, head_dim)), pages_dtype)
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


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    "shape",
    [
        {"num_tokens": 3, "heads": 8, "kv_heads": 4, "head_dim": 128, "parts": 2},
        {"num_tokens": 1, "rows": 8, "parts": 3},
        {"num_tokens": 5, "heads": 3, "kv_heads": 1},
        {"num_tokens": 2, "heads": 4, "kv_heads": 4, "head_dim": 256},
    ],
    ids=["parts", "one-token-of-eight-rows", "odd-heads", "wide-heads"],
)
def test_queries_and_pages_are_the_reference_s(shape):
    qkv, tables, pages, batch = inputs(**shape)
    want = reference.rope_write(qkv, tables, pages, batch, BF16)
    got = gpu.rope_write(qkv, tables, pages, batch.write_page, batch.write_offset, BF16)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        # Multiplied and added in one rounding or in two: the last bit may differ.
        np.testing.assert_allclose(mine.astype(jnp.float32), theirs.astype(jnp.float32), rtol=2**-7, atol=1e-6)
    changed = np.asarray((got[1] != pages).any(axis=(1, 2, 4)))
    assert changed.sum() == shape["num_tokens"]
    assert changed[batch.write_page, batch.write_offset].all()


def test_the_reference_writes_keys_turned_and_values_as_they_are():
    qkv, tables, pages, batch = inputs(3, parts=2)
    q, written = reference.rope_write(qkv, tables, pages, batch, BF16)
    heads = qkv.sum(0).astype(BF16).reshape(3, 8, 64)
    np.testing.assert_array_equal(q, reference.rotate(heads[:, :4], tables))
    places = written[batch.write_page, :, :, batch.write_offset]
    np.testing.assert_array_equal(places[:, 0], reference.rotate(heads[:, 4:6], tables))
    np.testing.assert_array_equal(places[:, 1], heads[:, 6:])


@pytest.mark.parametrize(("head_dim", "dtype"), [(96, jnp.bfloat16), (64, jnp.float8_e4m3fn)])
def test_shapes_and_types_that_the_kernel_does_not_do_go_the_plain_way(monkeypatch, head_dim, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    qkv, tables, pages, batch = inputs(2, head_dim=head_dim, pages_dtype=dtype)
    assert not gpu.supports(qkv, pages, BF16)
    got = api.rope_write(qkv, tables, pages, batch, BF16)
    for mine, theirs in zip(got, reference.rope_write(qkv, tables, pages, batch, BF16), strict=True):
        np.testing.assert_array_equal(mine.astype(jnp.float32), theirs.astype(jnp.float32))
