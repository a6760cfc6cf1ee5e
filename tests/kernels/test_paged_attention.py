"""Every implementation of paged attention against the reference, on random ragged batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import hopper
from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention import reference
from hex_llm.kernels.paged_attention.api import paged_attention
from hex_llm.kernels.paged_attention.pages import rounded, value
from hex_llm.kernels.window import Window
from tests.kernels.contexts import SCALE, expected, random_pages, spoil_unseen


def random_batch(rng, lengths, *, page_size, num_pages, table_width, tokens, seqs, decode_only, prompts_only):
    """`lengths`: (tokens in this step, tokens in all) of each sequence, those with one token first."""
    free = list(rng.permutation(np.arange(1, num_pages)))
    table = np.zeros((seqs, table_width), np.int32)
    position, page, offset = (np.zeros(tokens, np.int32) for _ in range(3))
    cu_q = np.zeros(seqs + 1, np.int32)
    kv_len = np.zeros(seqs, np.int32)
    t = 0
    for s, (new, total) in enumerate(lengths):
        pages = [free.pop() for _ in range(-(-total // page_size))]
        table[s, : len(pages)] = pages
        for p in range(total - new, total):
            position[t], page[t], offset[t] = p, pages[p // page_size], p % page_size
            t += 1
        cu_q[s + 1], kv_len[s] = t, total
    cu_q[len(lengths) + 1 :] = t
    num_decode = sum(new == 1 for new, _ in lengths)
    batch = Batch(
        tokens=jnp.zeros(tokens, jnp.int32),
        positions=jnp.asarray(position),
        write_page=jnp.asarray(page),
        write_offset=jnp.asarray(offset),
        cu_q=None if decode_only else jnp.asarray(cu_q),
        kv_len=jnp.asarray(kv_len),
        page_table=jnp.asarray(table),
        num_decode=None if prompts_only else jnp.int32(num_decode),
        num_seqs=jnp.int32(len(lengths)),
    )
    return batch, t


def compare(
    name, rng, lengths, *, dtype=jnp.float32, pages_dtype=None, page_size=8, heads=4, kv_heads=2, head_dim=16,
    decode_only=False, prompts_only=False, tokens=None, seqs=None, sinks=False, **options,
):  # fmt: skip
    used = sum(new for new, _ in lengths)
    seqs = seqs or len(lengths) + 2
    tokens = tokens or (seqs if decode_only else used + 5)
    table_width = max(-(-total // page_size) for _, total in lengths) + 1
    num_pages = 2 + sum(-(-total // page_size) for _, total in lengths)
    batch, used = random_batch(
        rng, lengths, page_size=page_size, num_pages=num_pages, table_width=table_width, tokens=tokens,
        seqs=seqs, decode_only=decode_only, prompts_only=prompts_only,
    )  # fmt: skip

    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    # What no sequence has written is poisoned: reading any of it shows.
    pages = np.full((num_pages, 2, kv_heads, page_size, head_dim), np.nan, np.float32)
    table, kv_len = np.asarray(batch.page_table), np.asarray(batch.kv_len)
    for row, length in zip(table, kv_len, strict=True):
        for position in range(length):
            shape = (2, kv_heads, head_dim)
            pages[row[position // page_size], :, :, position % page_size] = rng.standard_normal(shape)
    pages = rounded(jnp.asarray(pages), pages_dtype or dtype)
    q, k, v = (
        random(tokens, heads, head_dim),
        random(tokens, kv_heads, head_dim),
        random(tokens, kv_heads, head_dim),
    )
    options = {"scale": head_dim**-0.5, "sinks": 2 * random(heads) if sinks else None, **options}
    meant = jax.jit(lambda *args: reference.paged_attention(*args, **options))
    run = jax.jit(lambda *args: paged_attention(*args, implementation=name, **options))
    (want, want_pages), (got, got_pages) = (each(q, k, v, pages, batch) for each in (meant, run))
    tolerance = 2e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        np.asarray(got[:used], np.float32),
        np.asarray(want[:used], np.float32),
        atol=tolerance,
        rtol=tolerance,
    )
    for mine, theirs in zip(jax.tree.leaves(got_pages), jax.tree.leaves(want_pages), strict=True):
        np.testing.assert_array_equal(np.asarray(mine[1:], np.float32), np.asarray(theirs[1:], np.float32))


FAST = ["xla"]
FP8 = jnp.float8_e4m3fn
WINDOWS = [None, Window(64), Window(70, chunked=True), None]


@pytest.mark.parametrize("window", [None, Window(9), Window(8, chunked=True)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_reference_means_what_is_written_down_once_more_in_numpy(window, with_sinks):
    rng = np.random.default_rng(0)
    new, old = [1, 3, 10], [16, 7, 3]
    pages, table = random_pages(rng, np.add(new, old), kv_heads=2, head_dim=16, page_size=8, dtype=np.float32)
    q = rng.standard_normal((sum(new), 4, 16), np.float32)
    positions = np.concatenate([np.arange(o, o + n) for n, o in zip(new, old, strict=True)])
    zeros = jnp.zeros(len(positions), jnp.int32)
    batch = Batch(
        tokens=zeros,
        positions=jnp.asarray(positions, jnp.int32),
        write_page=zeros,
        write_offset=zeros,
        cu_q=jnp.asarray(np.cumsum([0, *new]), jnp.int32),
        kv_len=jnp.asarray(np.add(new, old), jnp.int32),
        page_table=jnp.asarray(table),
        num_decode=jnp.int32(1),
        num_seqs=jnp.int32(3),
    )
    options = {"window": window, "soft_cap": 3.0}
    sinks = np.asarray([0.5, -1, 3, 0], np.float32) if with_sinks else None
    spoilt = jnp.asarray(spoil_unseen(pages, table, new, old, window))
    got = reference.attend(jnp.asarray(q), spoilt, batch, scale=SCALE, sinks=sinks, **options)
    np.testing.assert_allclose(got, expected(q, pages, table, new, old, sinks=sinks, **options), atol=1e-5)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("seed", range(8))
def test_random_mixed_batches_agree_with_the_reference(name, seed):
    rng = np.random.default_rng(seed)
    decodes = [(1, int(rng.integers(1, 600))) for _ in range(rng.integers(0, 20))]
    prompts = []
    for _ in range(rng.integers(1, 4)):
        new = int(rng.integers(2, 300))
        prompts.append((new, new + int(rng.integers(0, 400)) * int(rng.integers(0, 2))))
    options = [
        {},
        {"window": Window(37)},
        {"soft_cap": 5.0, "sinks": True},
        {"window": Window(300), "soft_cap": 2.0},
        {"window": Window(37, chunked=True)},
        {"window": Window(300, chunked=True), "soft_cap": 2.0, "sinks": True},
        {},
        {"window": Window(100), "sinks": True},
    ][seed]
    compare(name, rng, decodes + prompts, page_size=int(rng.choice([8, 16, 32])), **options)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("seed", range(4))
def test_random_decode_batches_agree_with_the_reference(name, seed):
    rng = np.random.default_rng(100 + seed)
    lengths = [(1, int(rng.integers(1, 700))) for _ in range(rng.integers(1, 40))]
    compare(name, rng, lengths, decode_only=True, window=WINDOWS[seed], sinks=seed > 1)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("page_size", [8, 16, 32, 2048])
def test_every_page_size_works(name, page_size):
    rng = np.random.default_rng(page_size)
    compare(name, rng, [(1, 300), (1, 2300), (40, 90), (130, 2100)], page_size=page_size)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 1, 32), (12, 4, 64), (3, 1, 96)])
def test_every_grouping_of_heads_works_in_bfloat16(name, heads, kv_heads, head_dim):
    rng = np.random.default_rng(heads)
    lengths = [(1, 40), (1, 257), (64, 64), (33, 290)]
    compare(name, rng, lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=jnp.bfloat16)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("pages_dtype", [FP8, jnp.int8])
@pytest.mark.parametrize("seed", range(2))
def test_random_batches_with_pages_in_8_bits_agree_with_the_reference(name, dtype, pages_dtype, seed):
    rng = np.random.default_rng(200 + seed)
    lengths = [*((1, int(rng.integers(1, 600))) for _ in range(9)), (40, 90), (130, 420)]
    kind = {"pages_dtype": pages_dtype, "dtype": dtype, "window": WINDOWS[seed], "sinks": seed > 0}
    compare(name, rng, lengths, page_size=16, **kind)
    compare(name, rng, lengths[:9], page_size=16, decode_only=True, **kind)


def test_what_8_bits_cannot_hold_becomes_the_largest_that_they_can():
    large = jnp.asarray([1e4, -500.0, 449.0, 3.0625, jnp.inf], jnp.bfloat16)
    np.testing.assert_array_equal(rounded(large, FP8).astype(jnp.float32), [448, -448, 448, 3, 448])
    assert jnp.isnan(rounded(jnp.float32(jnp.nan), FP8))
    np.testing.assert_array_equal(rounded(large, jnp.bfloat16), large)


def test_whole_numbers_and_their_scale_are_off_by_at_most_half_a_127th_of_the_largest():
    x = np.random.default_rng(0).standard_normal((5, 3, 64)).astype(np.float32) * np.logspace(-9, 3, 5)[:, None, None]
    x[1, 2] = 0
    kept = rounded(jnp.asarray(x, jnp.float32), jnp.int8)
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype(jnp.int8), jnp.dtype(jnp.float32)}
    largest = np.abs(x).max(axis=-1, keepdims=True)
    assert (np.abs(value(kept) - x) <= largest * (0.5 / 127 + 1e-6)).all()
    spoilt = rounded(jnp.asarray([1.0, jnp.nan]), jnp.int8)
    assert jnp.isnan(value(spoilt)).all()


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([(1, 40), (1, 90), (9, 80), (5, 5)], {"window": Window(50)}),
        ([(1, 90), (9, 80), (40, 70)], {"window": Window(64, chunked=True), "sinks": True, "soft_cap": 3.0}),
        ([(12, 75), (7, 7)], {"prompts_only": True}),
        ([(1, 90), (1, 1)], {}),
        ([(1, 90), (9, 80)], {"pages_dtype": FP8}),
        ([(1, 90), (1, 200), (9, 80), (70, 70)], {"pages_dtype": jnp.int8}),
    ],
    ids=[
        "decodes-and-prompts-in-a-window",
        "chunked-window-and-sinks",
        "prompts",
        "decodes-in-a-mixed-bucket",
        "fp8",
        "int8",
    ],
)
def test_the_kernels_for_hopper_share_a_batch(monkeypatch, lengths, options):
    monkeypatch.setattr(hopper, "SMS", 2)
    rng = np.random.default_rng(7)
    heads = {"heads": 2, "kv_heads": 1, "head_dim": 64}
    compare("gpu", rng, lengths, dtype=jnp.bfloat16, page_size=32, **heads, **options)
