"""The warpgroup of prefill attention on Hopper that brings queries, keys and values into shared memory."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.paged_attention import gpu_scales
from hex_llm.kernels.paged_attention.gpu_prefill_sizes import Refs, Sizes, for_each_item

BLOCK_ROWS = 64  # of what is converted at once: its layout wants them

type Rows = tuple[Array | None, Array]  # of a tile: the first that a token sees, if it does not see all, and the end


def load(refs: Refs, sizes: Sizes, blocks: int) -> None:
    z = sizes

    def one_item(n: Array, item: dict[str, Array], head: Array, step: Array) -> Array:
        slot = lax.rem(n, z.q_slots)
        pl.when(n >= z.q_slots)(lambda: plgpu.barrier_wait(refs.q_empty.at[slot]))
        for g in range(z.group):
            plgpu.copy_gmem_to_smem(
                refs.q.at[pl.ds(pl.multiple_of(item["first_token"], 8), z.cell), head * z.group + g],
                refs.q_smem.at[slot, pl.ds(g * z.cell, z.cell)],
                refs.q_full.at[slot],
            )
        last_page = lax.div(item["kv_len"] - 1, z.page_size)
        first_seen = None if z.window is None else z.window.first(item["position"] + item["begin"])

        def places(tile: Array) -> tuple[Array, ...]:
            """Where the keys of a tile are, in parts of pages."""
            found = []
            for i in range(z.parts):
                index = tile * z.parts + i
                # Past the end the last page is read again; those keys are masked.
                page = refs.table[item["sequence"], jnp.minimum(lax.div(index, z.parts_per_page), last_page)]
                first = (page * 2 * z.num_kv_heads + head) * z.parts_per_page
                found.append(first + lax.rem(index, z.parts_per_page))
            return tuple(found)

        def one_tile(tile: Array, carry: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
            step, here = carry
            # The next tile's page ids are on their way while this one waits for its place.
            following = places(tile + 1)
            start = tile * z.kv_tile
            rows = None if first_seen is None else first_seen - start, item["kv_len"] - start
            if z.widened:
                _widen_tile(refs, z, item, tile, step, here, following, rows)
            else:
                _load_tile(refs, z, step, here, rows)
            return step + 1, following

        first = places(item["low"])
        if z.widened:
            for kind in range(2):
                _copy(refs, z, first, kind, refs.narrow_smem.at[kind], refs.landed.at[kind])
        step, _ = lax.fori_loop(item["low"], item["high"], one_tile, (step, first))
        return step

    for_each_item(refs, z, blocks, one_item)


def _copy(refs: Refs, sizes: Sizes, places: tuple[Array, ...], kind: int, smem: Any, barrier: Any) -> None:
    """Starts to copy the keys (0) or the values (1) of a tile."""
    for i, place in enumerate(places):
        source = refs.pages.at[place + kind * sizes.num_kv_heads * sizes.parts_per_page]
        plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(i * sizes.part, sizes.part)], barrier)


def _copy_scales(refs: Refs, sizes: Sizes, places: tuple[Array, ...], kind: int, slot: Array) -> None:
    for i, place in enumerate(places):
        source = refs.scales.at[place + kind * sizes.num_kv_heads * sizes.parts_per_page]
        target = refs.scales_smem.at[slot, kind, pl.ds(i * sizes.part, sizes.part)]
        gpu_scales.copy(source, target, refs.scales_landed.at[kind])


def _wait_for_place(empty: Any, step: Array, stages: int) -> None:
    pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[lax.rem(step, stages)]))


def _load_tile(refs: Refs, sizes: Sizes, step: Array, places: tuple[Array, ...], rows: Rows) -> None:
    slot, whole = lax.rem(step, sizes.stages), _is_whole(rows, sizes)
    _wait_for_place(refs.k_empty, step, sizes.stages)
    _copy(refs, sizes, places, 0, refs.k_smem.at[slot], refs.k_full.at[slot])
    _wait_for_place(refs.v_empty, step, sizes.stages)

    @pl.when(whole)
    def _whole() -> None:
        _copy(refs, sizes, places, 1, refs.v_smem.at[slot], refs.v_full.at[slot])

    @pl.when(~whole)
    def _part() -> None:
        _copy(refs, sizes, places, 1, refs.v_smem.at[slot], refs.landed.at[1])
        plgpu.barrier_wait(refs.landed.at[1])
        _convert(refs.v_smem.at[slot], refs.v_smem.at[slot], rows, sizes.swizzled_columns, plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        for _ in range(sizes.parts):
            plgpu.barrier_arrive(refs.v_full.at[slot])


def _widen_tile(
    refs: Refs,
    sizes: Sizes,
    item: dict[str, Array],
    tile: Array,
    step: Array,
    here: tuple[Array, ...],
    following: tuple[Array, ...],
    rows: Rows,
) -> None:
    """Widens a tile that is on its way already, and starts to copy the next one."""
    slot, whole = lax.rem(step, sizes.stages), _is_whole(rows, sizes)
    ring = ((refs.k_smem, refs.k_full, refs.k_empty), (refs.v_smem, refs.v_full, refs.v_empty))
    for kind, (smem, full, empty) in enumerate(ring):
        narrow, landed = refs.narrow_smem.at[kind], refs.landed.at[kind]
        plgpu.barrier_wait(landed)
        _wait_for_place(empty, step, sizes.stages)
        convert = functools.partial(_convert, narrow, smem.at[slot], width=sizes.swizzled_columns)
        if sizes.scaled:  # whole numbers are never NaN, but their scales may be
            _copy_scales(refs, sizes, here, kind, slot)
            convert(None, layout=plgpu.Layout.WGMMA_8BIT)
            plgpu.barrier_wait(refs.scales_landed.at[kind])
            if kind == 1:
                pl.when(~whole)(functools.partial(_clear_scales, refs.scales_smem.at[slot, kind], rows))
        elif kind == 0:  # scores of keys that are not seen are masked
            convert(None, layout=plgpu.Layout.WGMMA_8BIT)
        else:
            pl.when(whole)(lambda convert=convert: convert(None, layout=plgpu.Layout.WGMMA_8BIT))
            pl.when(~whole)(lambda convert=convert: convert(rows, layout=plgpu.Layout.WGMMA_8BIT))
        plgpu.commit_smem()
        plgpu.barrier_arrive(full.at[slot])

        @pl.when(tile + 1 < item["high"])
        def _next(kind: int = kind, narrow: Any = narrow, landed: Any = landed) -> None:
            _copy(refs, sizes, following, kind, narrow, landed)


def _clear_scales(scales_ref: Any, rows: Rows) -> None:
    """Zeroes those of values that are not seen, as `_convert` does with the values themselves where they have none."""
    scales = gpu_scales.load(scales_ref, 0)
    seen = _are_seen(rows, plgpu.broadcasted_iota(jnp.int32, scales.shape, 0, layout=gpu_scales.layout(0)))
    scales_ref[...] = jnp.where(seen, scales, jnp.zeros_like(scales))


def _is_whole(rows: Rows, sizes: Sizes) -> Array:
    first, end = rows
    return end >= sizes.kv_tile if first is None else (end >= sizes.kv_tile) & (first <= 0)


def _convert(source: Any, destination: Any, rows: Rows | None, width: int, layout: Any) -> None:
    """Copies some rows, or all, and zeroes the others: past its sequence's end, and before the window, a page may hold
    anything, also NaN, which a weight of 0 would not take away."""
    num_rows, columns = source.shape
    for start in range(0, num_rows, BLOCK_ROWS):
        for column in range(0, columns, width):
            block = pl.ds(start, BLOCK_ROWS), pl.ds(column, width)
            values = plgpu.load(source.at[block], layout=layout).astype(destination.dtype)
            if rows is not None:
                row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
                values = jnp.where(_are_seen(rows, row + start), values, jnp.zeros_like(values))
            destination[block] = values


def _are_seen(rows: Rows, row: Array) -> Array:
    first, end = rows
    seen = row < end
    return seen if first is None else seen & (row >= first)
