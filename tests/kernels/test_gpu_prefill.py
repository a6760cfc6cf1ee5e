"""Prefill attention for Hopper, without one: its plan, and its kernel in a simulator that looks for races."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hex_llm.kernels import hopper
from hex_llm.kernels.paged_attention import gpu_prefill_sizes
from hex_llm.kernels.paged_attention.gpu_prefill import prefill
from hex_llm.kernels.paged_attention.gpu_prefill_plan import ITEM, geometry, plan_prefill
from hex_llm.kernels.window import Window
from tests.kernels.contexts import SCALE, expected, kept, random_pages, seen_by, spoil_unseen

BF16, FP8, INT8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8
SINKS = np.asarray([1, -3, 0, 4, 2.5, -100], ml_dtypes.bfloat16)


one_program = jax.jit(plan_prefill, static_argnames=("num_tokens", "num_heads", "num_kv_heads", "head_dim", "window"))


def items_of(new, old, *, first=0, heads=(8, 2), head_dim=128, num_tokens=None, window=None):
    """The plan's items as dicts, and the plan."""
    cu_q = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    kv_len = np.where(np.asarray(new) > 0, np.add(new, old), 0).astype(np.int32)
    plan = one_program(
        jnp.asarray(cu_q),
        jnp.asarray(kv_len),
        first,
        len(new),
        num_tokens=num_tokens or int(cu_q[-1]),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        window=window,
    )
    rows = np.asarray(plan.items)[: int(plan.num_items[0])].tolist()
    return [dict(zip(ITEM, row, strict=True)) for row in rows], plan


BATCHES = [
    ([300], [0]),
    ([64, 0, 0], [5000, 0, 0]),
    ([1, 1, 5, 33, 70, 0], [70, 7, 300, 0, 1290, 0]),
    ([128, 40], [0, 126]),
    ([32, 40], [297, 326]),
]


# Every batch with all heads and all windows, and all heads with all windows.
HEADS, WINDOWS = [(8, 2), (16, 1), (3, 1)], [None, Window(200), Window(150, chunked=True)]
CASES = [(*batch, heads, WINDOWS[(i + j) % 3]) for i, batch in enumerate(BATCHES) for j, heads in enumerate(HEADS)]


@pytest.mark.parametrize(("new", "old", "heads", "window"), CASES)
def test_every_token_meets_every_key_it_sees_in_exactly_one_item(new, old, heads, window):
    items, _ = items_of(new, old, heads=heads, window=window, num_tokens=sum(new) + 5)
    cut = geometry(sum(new) + 5, heads[0], heads[1], 128)
    starts = np.cumsum([0, *new])
    met = [np.zeros((n, n + o), int) for n, o in zip(new, old, strict=True)]
    for item in items:
        s = item["sequence"]
        assert item["low"] <= item["edge"] <= item["diagonal"] <= item["high"]
        assert item["low"] < item["high"]
        assert item["first_token"] % 8 == 0
        assert 0 <= item["begin"] < item["end"] <= cut.tokens
        for row in range(item["begin"], item["end"]):
            token = item["first_token"] + row - starts[s]
            position = item["position"] + row
            assert position == old[s] + token
            oldest = np.argmax(seen_by([position], position + 1, window))
            keys = np.arange(item["low"] * cut.kv_tile, item["high"] * cut.kv_tile)
            met[s][token, keys[(keys >= oldest) & (keys <= position)]] += 1
            whole = slice(item["edge"] * cut.kv_tile, item["diagonal"] * cut.kv_tile)
            assert all(oldest <= key <= position for key in range(whole.start, whole.stop))
    for s, (n, o) in enumerate(zip(new, old, strict=True)):
        np.testing.assert_array_equal(met[s], seen_by(o + np.arange(n), n + o, window))


def test_sequences_before_the_first_and_those_without_tokens_have_no_items():
    items, plan = items_of([1, 1, 40, 0, 9], [50, 60, 0, 0, 3], first=2, num_tokens=64)
    assert {item["sequence"] for item in items} == {2, 4}
    chunks = np.asarray(plan.token_chunks)
    assert not chunks[:2].any()
    assert chunks[2:51].all()
    assert not chunks[51:].any()


def test_items_come_longest_first():
    items, _ = items_of([300, 40, 64], [0, 3000, 100], num_tokens=512)
    work = [item["high"] - item["low"] for item in items]
    assert work == sorted(work, reverse=True)
    assert len(set(work)) > 1


def test_parts_of_a_token_s_result_are_told_apart():
    items, plan = items_of([30, 40], [3000, 900], num_tokens=72)
    cut = geometry(72, 8, 2, 128)
    parts = [item["part"] for item in items]
    assert len(set(parts)) == len(parts)
    for item in items:
        tokens = slice(item["first_token"] + item["begin"], item["first_token"] + item["end"])
        assert set(np.asarray(plan.token_tile)[tokens].tolist()) == {item["part"] // cut.chunks}
        assert min(np.asarray(plan.token_chunks)[tokens].tolist()) > item["chunk"]


def test_few_tokens_after_a_long_context_are_split_so_that_all_cores_work():
    items, _ = items_of([64, 0], [32768, 0], heads=(32, 8))
    assert 120 <= 8 * len(items) <= 132


def test_many_tokens_are_not_split():
    assert geometry(512, 32, 8, 128).chunks == 1


def test_where_a_context_is_cut_depends_on_its_sequence_and_the_shapes_only():
    def cuts(new, old):
        items, _ = items_of(new, old, num_tokens=256, heads=(4, 1))
        return {item["low"] for item in items if item["kv_len"] == 77 + 3000}

    alone = cuts([77, 0, 0], [3000, 0, 0])
    assert len(alone) > 2
    assert alone == cuts([13, 77, 100], [500, 3000, 0])


@pytest.fixture
def small_chip(monkeypatch):
    """So few blocks, with so few places for keys and values, that each place is used several times."""
    monkeypatch.setattr(hopper, "SMS", 4)
    monkeypatch.setattr(gpu_prefill_sizes, "MOST_STAGES", 2)


def run(q, pages, table, new, old, *, first=0, window=None, soft_cap=None, sinks=None, dtype=None):
    cu_q = jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32)
    kv_len = jnp.asarray(np.where(np.asarray(new) > 0, np.add(new, old), 0), jnp.int32)
    plan = one_program(
        cu_q,
        kv_len,
        first,
        len(new),
        num_tokens=q.shape[0],
        num_heads=q.shape[1],
        num_kv_heads=pages.shape[2],
        head_dim=q.shape[2],
        window=window,
    )
    sinks = None if sinks is None else jnp.asarray(sinks)
    arrays = jnp.asarray(q), kept(pages, dtype), jnp.asarray(table)
    return np.asarray(prefill(*arrays, plan, scale=SCALE, window=window, soft_cap=soft_cap, sinks=sinks), np.float32)


def compare(new, old, heads, head_dim, page_size, dtype, *, first=0, **options):
    rng = np.random.default_rng(1)
    pages, table = random_pages(
        rng, np.add(new, old), kv_heads=heads[1], head_dim=head_dim, page_size=page_size, dtype=dtype
    )  # fmt: skip
    q = rng.standard_normal((-(-sum(new) // 8) * 8, heads[0], head_dim), np.float32).astype(BF16)
    spoilt = spoil_unseen(pages, table, new, old, options.get("window"))
    got = run(q, spoilt, table, new, old, first=first, dtype=dtype, **options)
    rows = slice(sum(new[:first]), sum(new))
    want = expected(q, pages, table, new, old, **options)
    np.testing.assert_allclose(got[rows], want[rows], atol=2**-7, rtol=2**-8)


@pytest.mark.usefixtures("small_chip", "simulator")
@pytest.mark.parametrize(
    ("new", "old", "heads", "head_dim", "page_size", "dtype", "options"),
    [
        ([1, 40, 9], [7, 100, 0], (4, 1), 128, 32, BF16, {"first": 1}),
        ([20, 13], [900, 200], (5, 1), 64, 8, BF16, {}),
        ([30, 9], [150, 3], (6, 2), 96, 64, BF16, {"window": Window(70), "soft_cap": 3.0}),
        ([150], [10], (1, 1), 64, 320, BF16, {}),
        ([20, 5], [70, 1], (16, 1), 256, 16, BF16, {}),
        ([40, 9], [140, 0], (4, 1), 128, 16, FP8, {}),
        ([40, 9], [140, 0], (4, 1), 128, 16, INT8, {"soft_cap": 3.0}),
        ([90, 40], [150, 3], (4, 2), 64, 8, INT8, {"window": Window(70)}),
        ([20, 5], [70, 1], (16, 1), 256, 32, INT8, {}),
        ([20, 13], [900, 200], (5, 1), 96, 64, INT8, {"sinks": SINKS[:5]}),
        ([90, 40], [150, 3], (4, 2), 64, 32, BF16, {"window": Window(100, chunked=True)}),
        ([20, 13], [900, 200], (5, 1), 64, 8, BF16, {"sinks": SINKS[:5], "window": Window(505, chunked=True)}),
        ([40, 30], [150, 3], (6, 2), 64, 32, BF16, {"sinks": SINKS[:6], "soft_cap": 3.0, "window": Window(60)}),
    ],
    ids=[
        "decode-first",
        "split",
        "window-cap",
        "large-page",
        "head-256",
        "fp8",
        "int8-cap",
        "int8-window",
        "int8-head-256",
        "int8-head-96-split-sinks",
        "chunked-window",
        "split-sinks-chunked-window",
        "sinks-cap-window",
    ],
)
def test_the_kernel_gives_the_reference_s_result(new, old, heads, head_dim, page_size, dtype, options):
    compare(new, old, heads, head_dim, page_size, dtype, **options)


@pytest.mark.usefixtures("small_chip", "simulator")
@pytest.mark.parametrize("dtype", [BF16, FP8, INT8])
def test_items_that_follow_each_other_in_a_block_keep_off_each_other_s_memory(monkeypatch, dtype):
    monkeypatch.setattr(hopper, "SMS", 1)
    compare([9, 20, 5, 3], [140, 300, 260, 0], (4, 1), 64, 32, dtype)


@pytest.mark.usefixtures("small_chip", "simulator")
def test_a_sequence_has_the_same_bits_alone_and_in_company_elsewhere_in_the_batch():
    rng = np.random.default_rng(2)
    new, old = [13, 40, 3], [30, 500, 64]
    pages, table = random_pages(rng, np.add(new, old), kv_heads=1, head_dim=64, page_size=32, dtype=BF16)
    q = rng.standard_normal((64, 4, 64), np.float32).astype(BF16)
    together = run(q, pages, table, new, old)
    alone = run(np.roll(q, -13, axis=0), pages, table[[1, 0, 2]], [40, 0, 0], [500, 0, 0])
    np.testing.assert_array_equal(alone[:40], together[13:53])


def test_shapes_it_does_not_do_are_refused_with_the_reason():
    shapes = [((8, 8, 80), jnp.bfloat16), ((9, 2, 2, 32, 80), jnp.bfloat16), ((4, 5), jnp.int32)]
    q, pages, table = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    _, plan = items_of([8], [0])
    with pytest.raises(ValueError, match="head_dim is 80"):
        jax.eval_shape(lambda *args: prefill(*args, plan, scale=0.1), q, pages, table)
