"""The warpgroup of decode attention on Hopper that brings queries, keys and values into shared memory."""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.hopper import MMA_ROWS
from hex_llm.kernels.paged_attention import gpu_scales
from hex_llm.kernels.paged_attention.gpu_decode_chunks import Chunk, Refs, Turns, for_each_chunk
from hex_llm.kernels.paged_attention.gpu_decode_sizes import Q_SLOTS, SWIZZLE_ROWS, Sizes


def load(refs: Refs, sizes: Sizes) -> None:
    """Keeps the ring of tiles, and the next chunk's queries, filled."""
    if not sizes.turned:
        zeros = plgpu.layout_cast(jnp.zeros((MMA_ROWS, sizes.head_dim), sizes.dtype), plgpu.Layout.WGMMA)
        for slot in range(Q_SLOTS):
            refs.q_smem[slot] = zeros  # stays in the rows past q_rows
        plgpu.commit_smem()
    plgpu.set_max_registers(sizes.load_registers, action="decrease")
    parts_per_tile = sizes.tile // sizes.part
    parts_per_page = sizes.page_size // sizes.part

    def load_chunk(chunk: Chunk, turns: Turns) -> Turns:
        last_page = lax.div(chunk.length - 1, sizes.page_size)

        def load_tile(i: Array, turn: Array) -> Array:
            slot = lax.rem(turn, sizes.slots)
            first = (chunk.first_tile + i) * parts_per_tile
            sources = []
            for part in range(parts_per_tile):
                # Past the end, the last page again, which is a page of ours and in the cache. The ids are read before
                # the slot is free, because it takes time.
                page_index, place = _divmod(first + part, parts_per_page)
                page = refs.table[chunk.sequence, jnp.minimum(page_index, last_page)]
                sources.append((page, place))
            pl.when(turn >= sizes.slots)(lambda: plgpu.barrier_wait(refs.empty.at[slot]))
            for part, (page, place) in enumerate(sources):
                for kind in range(2):
                    block = ((2 * page + kind) * sizes.num_kv_heads + chunk.head) * parts_per_page + place
                    target = refs.kv_smem.at[slot, kind, pl.ds(part * sizes.part, sizes.part)]
                    plgpu.copy_gmem_to_smem(refs.pages.at[block], target, refs.full.at[slot])
                    if refs.scales is not None:
                        target = refs.scales_smem.at[slot, kind, pl.ds(part * sizes.part, sizes.part)]
                        gpu_scales.copy(refs.scales.at[block], target, refs.full.at[slot])
            return turn + 1

        # The first tiles to be read need not wait for the kernel in front, but for the one with the last token.
        old = jnp.minimum(lax.div(chunk.length - 1, sizes.tile) - chunk.first_tile, chunk.num_tiles)
        early = jnp.where(turns.chunks == 0, jnp.minimum(old, sizes.slots), 0)
        turn = lax.fori_loop(0, early, load_tile, turns.tiles)
        pl.when(turns.chunks == 0)(plgpu.griddepcontrol_wait)
        q_slot = lax.rem(turns.chunks, Q_SLOTS)
        pl.when(turns.chunks >= Q_SLOTS)(lambda: plgpu.barrier_wait(refs.q_empty.at[q_slot]))
        first = sizes.first_q_block(chunk.row)
        for block in range(sizes.q_rows // SWIZZLE_ROWS):
            target = refs.q_smem.at[q_slot, pl.ds(block * SWIZZLE_ROWS, SWIZZLE_ROWS)]
            plgpu.copy_gmem_to_smem(refs.q.at[first + block], target, refs.q_full.at[q_slot])
        return Turns(lax.fori_loop(early, chunk.num_tiles, load_tile, turn), turns.chunks + 1)

    for_each_chunk(refs, sizes, load_chunk)


def _divmod(x: Array, divisor: int) -> tuple[Array, Array | int]:
    return (x, 0) if divisor == 1 else (lax.div(x, divisor), lax.rem(x, divisor))
