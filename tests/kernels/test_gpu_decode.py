"""Decode attention for Hopper, without one: its plan, and its kernels in a simulator that looks for races."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hex_llm.kernels.paged_attention import gpu_decode
from hex_llm.kernels.paged_attention.gpu_decode import Tuning, decode, plan_decode, refusal
from hex_llm.kernels.paged_attention.gpu_decode_plan import max_chunks
from hex_llm.kernels.window import Window
from tests.kernels.contexts import SCALE, expected, kept, random_pages, seen_by, spoil_unseen

MANY_CHUNKS = Tuning(chunk_cost=0, uneven_cost=64, merge_cost=0)


def dealt(plan, *, kv_heads, tile=64):
    """What each CTA gets: lists of (row, chunk, tiles), read from the plan as the kernel reads it."""
    sequences, shares = np.asarray(plan.sequences), np.asarray(plan.shares)
    result = []
    for (first_row, first_chunk), (last_row, end_chunk) in itertools.pairwise(shares):
        share = []
        for row in range(first_row, last_row + 1):
            length, first_tile, size, chunks = sequences[row // kv_heads]
            begin = first_chunk if row == first_row else 0
            end = end_chunk if row == last_row else chunks
            tiles = -(-length // tile) - first_tile
            share += [(row, chunk, min(size, tiles - chunk * size)) for chunk in range(begin, end)]
        result.append(share)
    return result


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("window", [None, Window(100), Window(100, chunked=True)])
@pytest.mark.parametrize(
    "lengths",
    [[1], [1500] * 8, [0, 0, 3], [5, 0, 0], [0, 0], [4000, 1, 0, 64, 65], [40000] + [9] * 63, list(range(0, 1280, 10))],
)
def test_every_chunk_of_every_row_is_dealt_once_and_in_order(lengths, window, kv_heads):
    plan = plan_decode(jnp.asarray(lengths, jnp.int32), num_kv_heads=kv_heads, window=window, num_cores=132)
    got = [item for share in dealt(plan, kv_heads=kv_heads) for item in share]
    want = []
    for row in range(len(lengths) * kv_heads):
        length, _, size, chunks = np.asarray(plan.sequences)[row // kv_heads]
        first = np.argmax(seen_by([length - 1], length, window)) // 64 if length else 0
        tiles = -(-length // 64) - first
        assert -(-tiles // size) == chunks <= max_chunks(len(lengths) * kv_heads)
        want += [(row, chunk, min(size, tiles - chunk * size)) for chunk in range(chunks)]
    assert got == want


@pytest.mark.parametrize("lengths", [[1500] * 64, [1500] * 8, [30000] * 3, list(range(1, 4000, 62))])
def test_shares_differ_by_less_than_two_chunks(lengths):
    plan = plan_decode(jnp.asarray(lengths, jnp.int32), num_kv_heads=8, num_cores=132)
    loads = [sum(tiles for *_, tiles in share) for share in dealt(plan, kv_heads=8)]
    assert max(loads) - min(loads) < 2 * int(np.asarray(plan.sequences)[:, 2].max())


def test_shares_of_unlike_rows_are_nearly_equal():
    lengths = np.random.default_rng(1).integers(1, 4001, 64)
    plan = plan_decode(jnp.asarray(lengths, jnp.int32), num_kv_heads=8, num_cores=132)
    loads = [sum(tiles for *_, tiles in share) for share in dealt(plan, kv_heads=8)]
    assert max(loads) < 1.08 * np.mean(loads)


@pytest.mark.parametrize(("batch", "fewest", "most"), [(128, 1, 2), (64, 1, 2), (8, 2, 4), (1, 12, 12)])
def test_rows_are_cut_no_finer_than_their_batch_needs(batch, fewest, most):
    plan = plan_decode(jnp.full(batch, 1500, jnp.int32), num_kv_heads=8, num_cores=132)
    assert fewest <= np.asarray(plan.sequences)[0, 3] <= most


def test_a_row_longer_than_chunks_can_be_many_has_larger_ones():
    plan = plan_decode(jnp.asarray([100_000] + [0] * 63, jnp.int32), num_kv_heads=8, num_cores=132)
    assert np.asarray(plan.sequences)[0, 2] > gpu_decode.DEFAULT.largest_chunk


def test_how_a_row_is_cut_depends_on_its_length_and_the_shapes_only():
    rng = np.random.default_rng(0)
    cuts = {}
    for _ in range(5):
        lengths = rng.choice([0, 1, 64, 700, 3000, 20000], 32)
        plan = plan_decode(jnp.asarray(lengths, jnp.int32), num_kv_heads=4, num_cores=132)
        for length, *cut in np.asarray(plan.sequences).tolist():
            assert cuts.setdefault(length, cut) == cut
    assert len(cuts) == 6


def test_no_share_trails_through_the_empty_rows_of_a_padded_batch():
    plan = plan_decode(jnp.asarray([100] * 4 + [0] * 60, jnp.int32), num_kv_heads=8, num_cores=132)
    assert np.asarray(plan.shares)[:, 0].max() < 4 * 8


def test_few_rows_are_cut_so_that_all_cores_work():
    plan = plan_decode(jnp.asarray([32768], jnp.int32), num_kv_heads=8, num_cores=132)
    assert sum(bool(share) for share in dealt(plan, kv_heads=8)) > 120


SINKS = np.asarray([1, -3, 0, 4, 2.5, -100, 7, -1], ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("seqs", "heads", "kv_heads"),
    [
        (64, 28, 4),
        (1, 28, 4),
        (2, 28, 4),
        (3, 3, 1),
        (8, 6, 2),
        (5, 40, 8),
        (64, 32, 8),
        (1, 16, 1),
        (4, 12, 4),
        (8, 26, 2),
    ],
)
def test_the_queries_of_a_row_are_among_those_that_are_copied_for_it(seqs, heads, kv_heads):
    q = jax.ShapeDtypeStruct((seqs, heads, 128), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((9, 2, kv_heads, 32, 128), jnp.bfloat16)
    sizes: Any = gpu_decode.sizes_of(q, pages, gpu_decode.DEFAULT)  # pyright: ignore[reportArgumentType]
    row = jnp.arange(seqs * kv_heads)
    copied = 8 * np.asarray(sizes.first_q_block(row))
    group, total = heads // kv_heads, seqs * (kv_heads * sizes.q_rows if sizes.padded else heads)
    np.testing.assert_array_equal(copied + sizes.first_q_row(row), row * (sizes.q_rows if sizes.padded else group))
    assert copied.min() >= 0
    assert (copied + sizes.q_rows).max() <= total
    assert (sizes.first_q_row(row) + group).max() <= sizes.q_rows if not sizes.padded else group <= sizes.q_rows


one_program = jax.jit(plan_decode, static_argnames=("num_kv_heads", "window", "num_cores", "tuning"))


def run(q, pages, table, lengths, *, tuning=None, cores=3, window=None, sinks=None, dtype=None, **options):
    pages = kept(pages, dtype)
    tuning = tuning or gpu_decode.tuning_for(q.shape[2], pages.dtype)
    plan = one_program(
        jnp.asarray(lengths, jnp.int32), num_kv_heads=pages.shape[2], window=window, num_cores=cores, tuning=tuning
    )
    sinks = None if sinks is None else jnp.asarray(sinks)
    out = decode(
        jnp.asarray(q),
        pages,
        jnp.asarray(table),
        plan,
        scale=SCALE,
        window=window,
        sinks=sinks,
        tuning=tuning,
        **options,
    )
    return np.asarray(out, np.float32)


BF16, FP8, INT8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8


def compare(lengths, heads, kv_heads, head_dim, page_size, dtype, *, tuning=None, cores=3, **options):
    rng = np.random.default_rng(1)
    pages, table = random_pages(
        rng, lengths, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype
    )  # fmt: skip
    q = rng.standard_normal((len(lengths), heads, head_dim), np.float32).astype(BF16)
    new, old = [min(length, 1) for length in lengths], [max(length - 1, 0) for length in lengths]
    spoilt = spoil_unseen(pages, table, new, old, options.get("window"))
    got = run(q, spoilt, table, lengths, tuning=tuning, cores=cores, dtype=dtype, **options)
    want = expected(q, pages, table, [1] * len(lengths), np.subtract(lengths, 1), **options)
    np.testing.assert_allclose(got, want, atol=1.5e-2, rtol=0)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "page_size", "dtype", "options"),
    [
        ([70, 0, 513], 8, 2, 128, 32, BF16, {"tuning": MANY_CHUNKS}),
        ([1, 200], 6, 2, 64, 8, BF16, {"window": Window(75), "soft_cap": 3.0}),
        ([300], 7, 1, 96, 128, BF16, {"tuning": Tuning(slots=2, largest_chunk=1)}),
        ([70, 0, 257], 4, 2, 64, 32, BF16, {"tuning": dataclasses.replace(MANY_CHUNKS, workers=1)}),
        ([64, 130], 16, 1, 256, 64, BF16, {}),
        ([64, 130], 2, 1, 256, 64, BF16, {"tuning": Tuning(turned=False), "soft_cap": 3.0}),
        ([70, 0, 513], 8, 2, 128, 32, BF16, {"tuning": dataclasses.replace(MANY_CHUNKS, turned=True)}),
        ([150, 0, 101, 9], 14, 2, 64, 8, FP8, {"tuning": Tuning(turned=True, tile=128), "window": Window(75)}),
        ([90, 65], 4, 1, 128, 16, FP8, {"tuning": dataclasses.replace(MANY_CHUNKS, turned=False)}),
        ([90, 0, 300], 8, 2, 128, 32, FP8, {"tuning": MANY_CHUNKS, "soft_cap": 3.0}),
        ([70, 200], 16, 2, 256, 64, FP8, {"window": Window(75)}),
        ([70, 130], 3, 1, 96, 32, FP8, {}),
        ([90, 0, 300], 8, 2, 128, 32, INT8, {"tuning": MANY_CHUNKS, "soft_cap": 3.0}),
        ([150, 0, 101, 9], 14, 2, 64, 8, INT8, {"window": Window(75)}),
        ([70, 200], 16, 2, 256, 64, INT8, {"sinks": np.tile(SINKS, 2)}),
        ([70, 130, 1], 3, 1, 96, 16, INT8, {"window": Window(100, chunked=True), "tuning": MANY_CHUNKS}),
        ([150, 101, 300, 1], 4, 2, 64, 32, BF16, {"window": Window(100, chunked=True), "tuning": MANY_CHUNKS}),
        ([70, 0, 257, 5], 6, 2, 64, 32, BF16, {"sinks": SINKS[:6], "tuning": MANY_CHUNKS}),
        ([70, 1], 8, 1, 128, 32, BF16, {"sinks": SINKS, "soft_cap": 3.0, "window": Window(60, chunked=True)}),
    ],
    ids=[
        "chunks",
        "window-cap-odd-group",
        "large-page",
        "one-worker",
        "head-256",
        "head-256-in-rows",
        "turned-chunks",
        "turned-fp8-window",
        "fp8-in-rows",
        "fp8",
        "fp8-head-256",
        "fp8-head-96",
        "int8",
        "int8-window",
        "int8-head-256-sinks",
        "int8-head-96",
        "chunked-window",
        "sinks",
        "sinks-cap-chunked-window",
    ],
)
def test_the_kernel_gives_the_reference_s_result(lengths, heads, kv_heads, head_dim, page_size, dtype, options):
    compare(lengths, heads, kv_heads, head_dim, page_size, dtype, **options)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, FP8, INT8])
def test_tiles_that_follow_each_other_in_a_block_keep_off_each_other_s_memory(dtype, workers):
    compare([300, 150, 70], 4, 1, 64, 32, dtype, tuning=Tuning(slots=2, workers=workers), cores=1)


@pytest.mark.usefixtures("simulator")
def test_a_row_has_the_same_bits_alone_and_among_others():
    rng = np.random.default_rng(2)
    lengths = [100, 333, 64]
    pages, table = random_pages(rng, lengths, kv_heads=2, head_dim=64, page_size=32, dtype=BF16)
    q = rng.standard_normal((3, 4, 64), np.float32).astype(BF16)
    together = run(q, pages, table, lengths, tuning=MANY_CHUNKS)
    alone = run(q, pages, table, [0, 333, 0], tuning=MANY_CHUNKS)
    np.testing.assert_array_equal(alone[1], together[1])
    assert not alone[0].any()
    assert not alone[2].any()


@pytest.mark.usefixtures("simulator")
def test_rows_of_zeros_follow_where_they_are_wanted():
    rng = np.random.default_rng(3)
    pages, table = random_pages(rng, [100], kv_heads=2, head_dim=128, page_size=32, dtype=BF16)
    q = rng.standard_normal((1, 4, 128), np.float32).astype(BF16)
    got = run(q, pages, table, [100], out_rows=8)
    assert got.shape == (8, 4, 128)
    np.testing.assert_array_equal(got[:1], run(q, pages, table, [100]))
    assert not got[1:].any()


@pytest.mark.usefixtures("simulator")
def test_rows_that_hold_no_query_have_no_weights():
    lengths = [100, 64]
    rng = np.random.default_rng(5)
    pages, table = random_pages(rng, lengths, kv_heads=2, head_dim=64, page_size=32, dtype=BF16)
    q, pages, table = jnp.ones((2, 8, 64), jnp.bfloat16), jnp.asarray(pages), jnp.asarray(table)
    plan = plan_decode(jnp.asarray(lengths, jnp.int32), num_kv_heads=2, num_cores=3)
    sizes = gpu_decode.sizes_of(q, pages, gpu_decode.DEFAULT)
    softmax = gpu_decode.Softmax(scale=SCALE, window=None, soft_cap=None)
    _, exponents = gpu_decode._attend(q, pages, table, plan, sizes, softmax)
    first_chunks = np.asarray(exponents)[:, 0]
    assert np.isfinite(first_chunks[:, : sizes.q_rows]).all()
    assert (first_chunks[:, sizes.q_rows :] == -np.inf).all()


@pytest.mark.parametrize(
    ("q_shape", "pages_shape", "pages_dtype", "reason"),
    [
        ((4, 32, 80), (9, 2, 8, 32, 80), jnp.bfloat16, "head_dim is 80, not one of 64, 96, 128, 256"),
        ((4, 32, 128), (9, 2, 1, 32, 128), jnp.bfloat16, "32 query heads for 1 kv heads"),
        ((4, 32, 128), (9, 2, 8, 48, 128), jnp.bfloat16, "page size is 48, not 8, 16, 32 or a multiple of 64"),
        (
            (4, 32, 128),
            (9, 2, 8, 32, 128),
            jnp.float32,
            "pages of float32 are not bfloat16 with one of bfloat16, float8_e4m3fn, int8",
        ),
    ],
)
def test_shapes_it_does_not_do_are_refused_with_the_reason(q_shape, pages_shape, pages_dtype, reason):
    q = jax.ShapeDtypeStruct(q_shape, jnp.bfloat16)
    pages = jax.ShapeDtypeStruct(pages_shape, pages_dtype)
    table = jax.ShapeDtypeStruct((4, 5), jnp.int32)
    plan = jax.eval_shape(lambda x: plan_decode(x, num_kv_heads=8), jax.ShapeDtypeStruct((4,), jnp.int32))
    assert reason in (refusal(q.shape, pages.shape, q.dtype, pages.dtype) or "")
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(lambda *args: decode(*args, scale=0.1), q, pages, table, plan)


def test_shapes_it_does_are_supported():
    for head_dim in (64, 96, 128, 256):
        for page_size in (8, 16, 32, 64, 128, 192, 256, 512):
            for group in (1, 3, 4, 7, 16):
                shapes = (1, 2 * group, head_dim), (3, 2, 2, page_size, head_dim)
                assert refusal(*shapes, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16)) is None
