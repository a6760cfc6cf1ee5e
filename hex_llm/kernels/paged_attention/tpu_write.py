"""Putting a step's keys and values into their pages, on TPUs.

Memory is copied in whole tiles, so a token's keys cannot be written alone. Tokens of a sequence that lie in one slab, a
few rows of a page, are a run: the slab is read, unless the run fills it, the run's rows are replaced, and it is written
back. Many slabs are under way at a time.
"""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.paged_attention.pages import rounded, value
from hex_llm.kernels.paged_attention.tpu_blocks import quotient, remainder
from hex_llm.kernels.paged_attention.tpu_sizes import LANES, write_sizes


def plan_runs(cu_q: Array | None, write_offset: Array, slab: int) -> Array:
    """[T]: how many tokens, from each on, are in its slab and of its sequence."""
    if cu_q is None:
        return jnp.ones_like(write_offset)
    token = jnp.arange(write_offset.shape[0], dtype=jnp.int32)
    # The end of its sequence: the first that is greater. Padding has none.
    ends = jnp.where(cu_q[None, 1:] > token[:, None], cu_q[None, 1:], token.shape[0])
    return jnp.minimum(jnp.min(ends, axis=1) - token, slab - write_offset % slab)


def write_pages(
    pages: Array, k: Array, v: Array, write_page: Array, write_offset: Array, runs: Array, num_tokens: Array, slab: int
) -> Array:
    """Pages [P, 2, K, page, H] with the first tokens of k and v [T, K, H] written at their places.

    Two tokens must not share a slab, unless they are of one run.
    """
    _, _, num_kv_heads, page_size, head_dim = pages.shape
    sizes = write_sizes(pages.shape, k.shape[0], slab, pages.dtype)
    # Rows are moved by any number of places, which 32-bit numbers allow, if a row is one tile wide.
    columns = min(head_dim, LANES)
    kv = value(rounded(jnp.stack([k, v]), pages.dtype)).astype(jnp.float32)
    kv = kv.reshape(2, kv.shape[1], -1, columns).swapaxes(1, 2)
    kv = jnp.pad(kv, ((0, 0), (0, 0), (0, -kv.shape[2] % sizes.tokens), (0, 0)))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, lead=sizes.ring // 2),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(kv.shape[2] // sizes.tokens,),
            in_specs=[pl.BlockSpec((*kv.shape[:2], sizes.tokens, columns), lambda i, *_: (0, 0, i, 0)), anywhere],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((sizes.ring, 2, num_kv_heads, slab, head_dim), pages.dtype),
                pltpu.SemaphoreType.DMA((sizes.ring,)),
                pltpu.SemaphoreType.DMA((sizes.ring,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        name="paged_attention_write",
    )(write_page * page_size + write_offset, runs, num_tokens.reshape(1), kv, pages)


def _kernel(
    places: Any,
    runs: Any,
    num_tokens: Any,
    kv: Any,
    _: Any,
    pages: Any,
    ring: Any,
    read: Any,
    written: Any,
    *,
    lead: int,
) -> None:
    _, pieces, tokens, columns = kv.shape
    slots, _, num_kv_heads, slab, _ = ring.shape
    per_head = pieces // num_kv_heads
    page_size = pages.shape[3]
    base = pl.program_id(0) * tokens
    end = jnp.minimum(base + tokens, num_tokens[0])

    def length(token: Array) -> Array:
        return jnp.minimum(runs[token], end - token)

    def there(token: Array) -> Any:
        place = places[token]
        page, offset = quotient(place, page_size), remainder(place, page_size)
        row = pl.multiple_of(offset - remainder(offset, slab), slab)
        return pages.at[page, :, :, pl.ds(row, slab)]

    def reading(token: Array, slot: Array) -> Any:
        return pltpu.make_async_copy(there(token), ring.at[slot], read.at[slot])

    def writing(token: Array, slot: Array) -> Any:
        return pltpu.make_async_copy(ring.at[slot], there(token), written.at[slot])

    def sent(slot: Array) -> Any:
        """As `writing`, but only to wait for."""
        return pltpu.make_async_copy(ring.at[slot], ring.at[slot], written.at[slot])

    def fetch(token: Array, count: Array) -> tuple[Array, Array]:
        """Fetches the slab of the run at `token`, the count-th; gives the run after it."""
        inside, slot = token < end, remainder(count, slots)
        token = jnp.minimum(token, end - 1)

        @pl.when(inside & (count >= slots))
        def _():
            sent(slot).wait()

        @pl.when(inside & (length(token) < slab))
        def _():
            reading(token, slot).start()

        return jnp.where(inside, token + length(token), end), count + inside.astype(jnp.int32)

    def replace(token: Array, count: Array) -> tuple[Array, Array]:
        """Replaces the rows of the run at `token` in its slab, which was fetched, and sends it back."""
        slot, size = remainder(count, slots), length(token)

        @pl.when(size < slab)
        def _():
            reading(token, slot).wait()

        first = remainder(places[token], slab)
        # Row 0 of the slab is of the token `wanted`, which may lie before those at hand, or its last row after them.
        wanted = token - base - first
        start = jnp.clip(wanted, 0, tokens - slab)
        turn = remainder(start - wanted + slab, slab)
        row = lax.broadcasted_iota(jnp.int32, (slab, columns), 0)
        mine = (row >= first) & (row < first + size)
        for side, piece in itertools.product(range(2), range(pieces)):
            rows = pltpu.roll(kv[side, piece, pl.ds(start, slab)], turn, 0)
            head, column = divmod(piece, per_head)
            at = slot, side, head, slice(None), pl.ds(column * columns, columns)
            ring[at] = jnp.where(mine, rows, ring[at].astype(jnp.float32)).astype(ring.dtype)
        writing(token, slot).start()
        return token + size, count + 1

    def step(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        ahead, token = fetch(*state[:2]), replace(*state[2:])
        return *ahead, *token

    @pl.when(base < end)
    def _():
        start = base, jnp.int32(0)
        ahead = lax.fori_loop(0, lead, lambda _, state: fetch(*state), start)
        *_, count = lax.while_loop(lambda state: state[2] < end, step, (*ahead, *start))
        # The next step of the grid may begin with a slab that this one ended with.
        lax.fori_loop(jnp.maximum(count - slots, 0), count, lambda n, _: sent(remainder(n, slots)).wait(), None)
