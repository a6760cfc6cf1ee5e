"""Paged attention for TPUs: sequences of one token by one kernel, the others by another."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention import pages as plain
from hex_llm.kernels.paged_attention import tpu_write, xla
from hex_llm.kernels.paged_attention.pages import Pages, Scaled
from hex_llm.kernels.paged_attention.tpu_decode import decode, plan_decode
from hex_llm.kernels.paged_attention.tpu_prefill import prefill
from hex_llm.kernels.paged_attention.tpu_prefill_plan import plan_prefill
from hex_llm.kernels.paged_attention.tpu_sizes import (
    LANES,
    TABLE_PIECE,
    prefill_tile,
    refusal,
    round_up,
    slab_rows,
    write_refusal,
)
from hex_llm.kernels.window import Window
from hex_llm.pytree import pytree

_ALL = Window(0)  # stands for no window where one has to be sorted

type Items = tuple[Array, Array]


@pytree
class Plan:
    """What a step's kernels go through, in order. All layers of one window share it."""

    runs: Array  # [T], see `tpu_write`
    table: Array  # [S, 1, B]: a row of the page table is whole tiles then, which can be copied
    decode: Items | None
    prefill: Items | None


def plans(batch: Batch, q: Any, pages: Any, windows: Iterable[Window | None]) -> dict[Window, Plan | None]:
    """A plan for each of the windows."""
    return {window or _ALL: plan(batch, q, pages, window) for window in windows}


def plan(batch: Batch, q: Any, pages: Any, window: Window | None) -> Plan | None:
    """For queries [T, N, H] and pages, or their shapes; None where the kernels do not do these."""
    if refusal(q.shape, pages.shape, batch.page_table.shape[1], q.dtype, pages.dtype):
        return None
    num_tokens, num_heads, _ = q.shape
    width = batch.page_table.shape[1]
    width = round_up(width, TABLE_PIECE if width > TABLE_PIECE else LANES)
    table = jnp.pad(batch.page_table, ((0, 0), (0, width - batch.page_table.shape[1])))[:, None, :]
    decodes = prompts = None
    if batch.num_decode is not None:
        decodes = plan_decode(batch.kv_len[: _decode_rows(batch, num_tokens)], batch.num_decode, window)
    if batch.cu_q is not None:
        prompts = plan_prefill(
            batch.cu_q,
            batch.kv_len,
            0 if batch.num_decode is None else batch.num_decode,
            batch.num_seqs,
            num_tokens=num_tokens,
            tile=prefill_tile(num_tokens, num_heads // pages.shape[2]),
            window=window,
        )
    return Plan(_runs(batch, pages.shape[3]), table, decodes, prompts)


def write_pages(pages: Pages, k: Array, v: Array, batch: Batch) -> Pages:
    """As `pages.write_pages`, but for padding, which is not written."""
    k, v = _widened(k, pages), _widened(v, pages)
    if write_refusal(pages.shape, pages.dtype):
        return plain.write_pages(pages, k, v, batch)
    assert not isinstance(pages, Scaled), "the kernel refuses these"
    shared = next(iter(batch.plans.values())) if batch.plans else None
    runs = _runs(batch, pages.shape[3]) if shared is None else shared.runs
    num_tokens = batch.num_decode if batch.cu_q is None else batch.cu_q[-1]
    assert num_tokens is not None, "a batch of decodes has a number of them"
    slab = slab_rows(pages.shape[3], batch.cu_q is None)
    return tpu_write.write_pages(pages, k, v, batch.write_page, batch.write_offset, runs, num_tokens, slab)


def attend(
    q: Array,  # [T, N, H]
    pages: Pages,  # [P, 2, K, page, H]
    batch: Batch,
    *,
    scale: float,
    window: Window | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """As `reference.attend`."""
    head_dim, q = q.shape[2], _widened(q, pages)
    return _attend(q, pages, batch, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)[:, :, :head_dim]


def _attend(q: Array, pages: Pages, batch: Batch, *, window: Window | None, **more: Any) -> Array:
    shared = batch.plans[window or _ALL] if batch.plans else plan(batch, q, pages, window)
    options: dict[str, Any] = {"window": window, **more}
    if shared is None:
        return xla.attend(q, pages, batch, **options)
    assert not isinstance(pages, Scaled), "the kernels refuse these"
    num_tokens = q.shape[0]
    if shared.prefill is None or batch.cu_q is None:
        assert shared.decode is not None, "a batch of decodes has a number of them"
        return decode(q, pages, shared.table, *shared.decode, **options)
    out = _prefill(q, pages, shared.table, shared.prefill, options)
    # Tiles without a prompt were not written to.
    mine = jnp.arange(num_tokens) < batch.cu_q[-1]
    decoded = jnp.zeros_like(out)
    if shared.decode is not None and batch.num_decode is not None:
        rows = _decode_rows(batch, num_tokens)
        decoded = decode(q[:rows], pages, shared.table, *shared.decode, **options)
        decoded = jnp.pad(decoded, ((0, num_tokens - rows), (0, 0), (0, 0)))
        mine &= jnp.arange(num_tokens) >= batch.num_decode
    return jnp.where(mine[:, None, None], out, decoded)


def _widened(heads: Array, pages: Pages) -> Array:
    """Heads [T, N, H] of the width that pages have: zeros add nothing to a product."""
    return jnp.pad(heads, ((0, 0), (0, 0), (0, pages.shape[4] - heads.shape[2])))


def _prefill(q: Array, pages: Array, table: Array, items: Items, options: dict[str, Any]) -> Array:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[2]
    group = num_heads // num_kv_heads
    tile = prefill_tile(num_tokens, group)
    padded = round_up(num_tokens, tile)
    rows = jnp.pad(q, ((0, padded - num_tokens), (0, 0), (0, 0))).reshape(padded, num_kv_heads, group, head_dim)
    rows = rows.swapaxes(0, 1).reshape(num_kv_heads, padded * group, head_dim)
    out = prefill(rows, pages, table, *items, tile=tile, group=group, **options)
    out = out.reshape(num_kv_heads, padded, group, head_dim).swapaxes(0, 1)
    return out.reshape(padded, num_heads, head_dim)[:num_tokens]


def _runs(batch: Batch, page_size: int) -> Array:
    return tpu_write.plan_runs(batch.cu_q, batch.write_offset, slab_rows(page_size, batch.cu_q is None))


def _decode_rows(batch: Batch, num_tokens: int) -> int:
    """A decode's token has the number of its sequence."""
    return min(num_tokens, batch.kv_len.shape[0])
