"""The TPU's paged attention against the reference, in Pallas' interpreter of TPU kernels, which looks for races."""

import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from hex_llm.catalog.entry import config_of
from hex_llm.catalog.index import ENTRIES
from hex_llm.kernels.paged_attention import reference, tpu, tpu_sizes
from hex_llm.kernels.paged_attention.api import attend, prepare
from hex_llm.kernels.paged_attention.pages import rounded
from hex_llm.kernels.rope_write.api import rope_write
from hex_llm.kernels.window import Window
from hex_llm.loader.config_json import parse_config
from hex_llm.models.arch import Arch
from hex_llm.models.split import Split
from tests.kernels.test_paged_attention import random_batch

BF16, F32, FP8 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn


@pytest.fixture(autouse=True)
def _interpreter():
    pltpu.reset_tpu_interpret_mode_state()
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    assert interpreter.races is None or not interpreter.races.races_found
    pltpu.reset_tpu_interpret_mode_state()


def random_step(
    rng, lengths, *, dtype, page_size, heads, kv_heads, head_dim, tokens, pages_dtype=None, seqs=6, width=None, **kind
):
    """A batch, its queries, keys and values, and pages in which all is NaN that no sequence has written."""
    width = width or -(-700 // page_size)
    num_pages = 4 + seqs * width
    batch, used = random_batch(
        rng, lengths, page_size=page_size, num_pages=num_pages, table_width=width, tokens=tokens, seqs=seqs,
        decode_only=kind.get("decode_only", False), prompts_only=kind.get("prompts_only", False),
    )  # fmt: skip
    pages = np.full((num_pages, 2, kv_heads, page_size, head_dim), np.nan, np.float32)
    for row, length in zip(np.asarray(batch.page_table), np.asarray(batch.kv_len), strict=True):
        for position in range(length):
            shape = (2, kv_heads, head_dim)
            pages[row[position // page_size], :, :, position % page_size] = rng.standard_normal(shape)
    q, k, v = (
        jnp.asarray(rng.standard_normal((tokens, n, head_dim), np.float32), dtype) for n in (heads, kv_heads, kv_heads)
    )
    return batch, used, q, k, v, jnp.asarray(pages, pages_dtype or dtype)


def check(rng, batches, *, sinks=False, window=None, soft_cap=None, **shape):
    """That each of the batches, all of one shape, gets what the reference gives it."""
    options = {"scale": 0.1, "window": window, "soft_cap": soft_cap}

    @jax.jit
    def run(q, k, v, pages, batch, sinks):
        batch = dataclasses.replace(batch, plans=tpu.plans(batch, q, pages, [window]))
        pages = tpu.write_pages(pages, k, v, batch)
        return tpu.attend(q, pages, batch, sinks=sinks, **options), pages

    expected = jax.jit(partial(reference.paged_attention, **options))
    sinks = jnp.asarray(2 * rng.standard_normal(shape["heads"]), shape["dtype"]) if sinks else None
    for lengths in batches:
        batch, used, q, k, v, pages = random_step(rng, lengths, **shape)
        assert tpu.plan(batch, q, pages, window) is not None  # or XLA's attention would be tested
        got, got_pages = run(q, k, v, pages, batch, sinks)
        want, want_pages = expected(q, k, v, pages, batch, sinks=sinks)
        np.testing.assert_array_equal(np.asarray(got_pages[1:], np.float32), np.asarray(want_pages[1:], np.float32))
        tolerance = 2e-5 if shape["dtype"] == F32 else 2e-2
        np.testing.assert_allclose(
            np.asarray(got[:used], np.float32), np.asarray(want[:used], np.float32), atol=tolerance, rtol=tolerance
        )
        assert not np.isnan(np.asarray(got, np.float32)).any()
    return run


def random_lengths(rng, tokens, *, decodes, prompts):
    """Of sequences that together have at most so many tokens in this step, and at most 700 in all each."""
    lengths = [(1, int(rng.integers(1, 700))) for _ in range(decodes)]
    left = tokens - decodes
    for i in range(prompts):
        new = int(rng.integers(2, max(left // (prompts - i), 3)))
        lengths.append((new, new + int(rng.integers(0, 2)) * int(rng.integers(0, 700 - new))))
        left -= new
    return lengths


@pytest.fixture
def small(monkeypatch):
    """Blocks and tiles so small that short sequences have many."""
    for name, value in {"DECODE_BLOCK": 128, "PREFILL_BLOCK": 128, "PREFILL_ROWS": 48, "WRITE_BYTES": 1 << 15}.items():
        monkeypatch.setattr(tpu_sizes, name, value)
    return monkeypatch


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"dtype": BF16, "page_size": 16, "heads": 6, "kv_heads": 2, "head_dim": 64}, {"window": Window(100)}),
        ({"dtype": F32, "page_size": 8, "heads": 4, "kv_heads": 4, "head_dim": 80}, {"sinks": True, "soft_cap": 3.0}),
        (
            {"dtype": BF16, "page_size": 256, "heads": 7, "kv_heads": 1, "head_dim": 256},
            {"window": Window(150, chunked=True), "sinks": True},
        ),
        (
            {"dtype": BF16, "pages_dtype": FP8, "page_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 128},
            {"window": Window(100)},
        ),
    ],
    ids=["windows", "sinks-and-soft-cap", "chunks-in-large-pages", "fp8"],
)
def test_mixed_batches_agree_with_the_reference(shape, options):
    rng = np.random.default_rng(shape["page_size"])
    batches = [random_lengths(rng, 70, decodes=i % 4, prompts=1 + i % 3) for i in (2, 3)]
    check(rng, [*batches, [(1, 129), (1, 1)]], tokens=72, **shape, **options)


def test_prompts_agree_with_the_reference_in_groups_of_heads(small):
    small.setattr(tpu_sizes, "PREFILL_BYTES", 1 << 18)
    assert tpu_sizes.prefill_sizes((9, 2, 3, 32, 96), 128, 48, BF16).num_kv_heads == 1
    rng = np.random.default_rng(1)
    shape = {"dtype": BF16, "page_size": 32, "heads": 6, "kv_heads": 3, "head_dim": 96}
    batches = [random_lengths(rng, 70, decodes=0, prompts=n) for n in (1, 3)]
    check(rng, batches, tokens=72, prompts_only=True, **shape)


def test_decodes_agree_with_the_reference(small):
    """With queries in several steps, and a page table in several pieces."""
    small.setattr(tpu_sizes, "QUERIES_BYTES", 1)
    small.setattr(tpu_sizes, "TABLE_PIECE", 128)
    small.setattr(tpu, "TABLE_PIECE", 128)
    rng = np.random.default_rng(2)
    batches = [random_lengths(rng, 18, decodes=n, prompts=0) for n in (18, 5)]
    shape = {"dtype": BF16, "page_size": 32, "heads": 8, "kv_heads": 1, "head_dim": 128}
    check(rng, batches, tokens=18, seqs=18, width=300, decode_only=True, window=Window(300), **shape)


@pytest.mark.usefixtures("small")
def test_a_sequence_s_answer_has_the_same_bits_whatever_is_beside_it():
    rng = np.random.default_rng(4)
    shape = {"dtype": F32, "page_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 64}
    lengths = [(1, 300), (1, 200), (13, 140), (30, 190), (9, 9)]
    batch, _, q, k, v, pages = random_step(rng, lengths, tokens=56, **shape)
    run = check(rng, [], **shape)
    before, _ = run(q, k, v, pages, batch, None)
    start, stop = (int(x) for x in batch.cu_q[3:5])
    mine = jnp.zeros(56, bool).at[1].set(True).at[start:stop].set(True)[:, None, None]
    owned = jnp.zeros(pages.shape[0], bool).at[batch.page_table[jnp.asarray([1, 3])]].set(True)
    q, k, v = (jnp.where(mine, x, jnp.nan) for x in (q, k, v))
    pages = jnp.where(owned[:, None, None, None, None], pages, jnp.nan)
    after, _ = run(q, k, v, pages, batch, None)
    np.testing.assert_array_equal(np.asarray(before)[mine[:, 0, 0]], np.asarray(after)[mine[:, 0, 0]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"page_size": 8192, "width": 16}, None),
        ({"page_size": 8, "width": 16384}, None),
        ({"page_size": 4}, "block size is 4"),
        ({"page_size": 24}, "block size is 24"),
        ({"page_size": 384}, "block size is 384, not a power of two"),
        (
            {"page_size": 32, "width": 100_000},
            "sequences of 3200000 tokens in blocks of 32 .* holds the numbers of 65536",
        ),
        ({"head_dim": 192}, "head_dim is 192"),
        ({"heads": 34, "kv_heads": 2}, "groups of 17"),
        ({"heads": 64}, None),
        ({"heads": 128}, "groups of 64 query heads are more than 32"),
        ({"kv_heads": 3}, "8 query heads are not a multiple of 3"),
        ({"kv_heads": 256, "heads": 256, "dtype": F32}, "vector memory"),
        ({"dtype": jnp.float16}, "not of bfloat16, float32, float8_e4m3fn"),
        ({"pages_dtype": FP8}, None),
        ({"dtype": F32, "pages_dtype": FP8}, "queries of .*float32.* nor bfloat16 with float8_e4m3fn"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_number_and_the_limit(changes, words):
    size = {"heads": 8, "kv_heads": 2, "head_dim": 128, "page_size": 32, "width": 4096, "dtype": BF16} | changes
    q = (16, size["heads"], size["head_dim"])
    pages = (100, 2, size["kv_heads"], size["page_size"], size["head_dim"])
    refused = tpu_sizes.refusal(q, pages, size["width"], size["dtype"], size.get("pages_dtype", size["dtype"]))
    assert refused is None if words is None else re.search(words, refused or "")


@cache
def every_arch() -> list[Arch]:
    return [parse_config(config_of(entry), entry.name).arch for entry in ENTRIES]


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("page_size", [8, 16, 32, 2048, 8192])
def test_every_model_of_the_catalog_is_done_by_the_kernels(devices, page_size):
    for arch in every_arch():
        split = Split(arch, devices)
        pages = (9, 2, split.kv_heads, page_size, arch.head_dim)
        width = -(-min(arch.max_position, 131072) // page_size)
        refused = tpu_sizes.refusal((9, split.heads, arch.head_dim), pages, width, BF16, BF16)
        assert refused is None, arch


def test_on_a_tpu_a_layer_writes_and_attends_by_the_kernels(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    rng = np.random.default_rng(5)
    shape = {"page_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 64}
    batch, _, _, _, _, pages = random_step(rng, [(1, 20), (9, 30)], tokens=16, dtype=BF16, **shape)

    def layer(qkv, pages, batch):
        q = jax.ShapeDtypeStruct((16, 4, 64), BF16)
        batch = prepare(batch, q, pages, [None])
        q, pages = rope_write(qkv, None, pages, batch, jnp.dtype(BF16))
        return attend(q, pages, batch, scale=0.1), pages

    def kernels(pages):
        program = str(jax.make_jaxpr(layer)(jnp.zeros((1, 16, 8 * 64), BF16), pages, batch))
        return set(re.findall(r"name=(paged_attention_\w+)", program))

    assert kernels(pages) == {"paged_attention_write", "paged_attention_decode", "paged_attention_prefill"}
    assert kernels(pages.astype(jnp.float16)) == set()
    assert kernels(rounded(pages, jnp.int8)) == set()
