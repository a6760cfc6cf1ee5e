"""Who computes what in a step's decode attention: plain XLA, once per step, shared by all layers of a window."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from hex_llm.kernels.hopper import num_sms
from hex_llm.kernels.window import Window
from hex_llm.pytree import pytree


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What can be chosen freely; the plan and the kernel must agree on it."""

    tile: int = 64  # tokens per ring slot: a multiple of 64
    slots: int | None = None  # of the ring, if as many fit; None: as many as are good for the shape
    # Queries as columns, which heads of a multiple of 64 can be; None: where heads are large.
    turned: bool | None = None
    workers: int = 2  # warpgroups that multiply: one, or two which take a CTA's chunks in turn (turned: one)
    # Rows of unlike length share well only if no chunk is large, for a share is off by up to one chunk. Those who are
    # late have the memory to themselves, but an SM alone reads little faster than one of many.
    largest_chunk: int = 12  # tiles, where max_chunks allows it
    # What cutting costs, in eighths of the time a tile takes.
    chunk_cost: int = 20  # a CTA's for each of its chunks
    uneven_cost: int = 4  # for each tile of the largest chunk, because shares are uneven where rows are
    merge_cost: int = 2  # for each partial result of a row


DEFAULT = Tuning()
NARROW = Tuning(tile=128)  # for 8-bit pages: as many bytes, and half of what each tile costs beside them


def tuning_for(head_dim: int, pages_dtype: Any) -> Tuning:
    """What is best for heads and pages. Of larger heads, registers do not hold two tiles' worth."""
    return NARROW if jnp.dtype(pages_dtype).itemsize == 1 and head_dim in (64, 128) else DEFAULT


@pytree
class DecodePlan:
    """The chunks of each row, and the share of them that each CTA computes."""

    sequences: Array  # [S, 4] int32: length, first tile, tiles per chunk, number of chunks
    shares: Array  # [cores + 1, 2] int32: row and chunk at which each CTA's share begins


def plan_decode(
    kv_len: Array,  # [S] int32
    *,
    num_kv_heads: int,
    window: Window | None = None,
    num_cores: int | None = None,
    tuning: Tuning = DEFAULT,
) -> DecodePlan:
    """Cuts the rows of a batch into chunks and deals these to the CTAs. Sequences of length 0 get none."""
    cores = num_cores or num_sms()
    num_seqs, tile = kv_len.shape[0], tuning.tile
    position = jnp.maximum(kv_len - 1, 0)
    first_tile = jnp.zeros_like(kv_len) if window is None else window.first(position) // tile
    tiles = pl.cdiv(kv_len, tile) - first_tile
    chunk = _tiles_per_chunk(tiles, rows=num_seqs * num_kv_heads, cores=cores, tuning=tuning)
    chunks = pl.cdiv(tiles, chunk)

    # Sums over all pairs, which XLA fuses, where cumsum and searchsorted would be kernels and loops of their own.
    seq = jnp.arange(num_seqs, dtype=jnp.int32)
    ends = num_kv_heads * jnp.sum(jnp.where(seq[None, :] <= seq[:, None], tiles[None, :], 0), axis=1)
    core = jnp.arange(cores + 1, dtype=jnp.int32)
    cuts = core * (ends[-1] // cores) + jnp.minimum(core, ends[-1] % cores)
    # A cut between two rows counts to the one that ends there, so that no share trails through empty rows.
    cut_seq = jnp.minimum(jnp.sum(ends[None, :] < cuts[:, None], axis=1), num_seqs - 1)
    seq_tiles = tiles[cut_seq]
    offset = cuts - (ends[cut_seq] - num_kv_heads * seq_tiles)
    head = jnp.maximum(offset - 1, 0) // jnp.maximum(seq_tiles, 1)
    cut_chunk = pl.cdiv(offset - head * seq_tiles, chunk[cut_seq])
    return DecodePlan(
        sequences=jnp.stack([kv_len, first_tile, chunk, chunks], axis=1).astype(jnp.int32),
        shares=jnp.stack([cut_seq * num_kv_heads + head, cut_chunk], axis=1).astype(jnp.int32),
    )


def max_chunks(rows: int) -> int:
    """Chunks a row may be cut into: many where rows are few, within bounded memory for their results."""
    return max(16, min(64, 16384 // rows))


def _tiles_per_chunk(tiles: Array, *, rows: int, cores: int, tuning: Tuning) -> Array:
    """The size of the chunks that is best for a row if all rows were as long: [S], at least 1."""
    most = max_chunks(rows)
    counts = jnp.arange(1, most + 1, dtype=jnp.int32)[None, :]
    sizes = jnp.maximum(pl.cdiv(tiles[:, None], counts), 1)
    chunks_per_core = pl.cdiv(rows * counts, cores)
    costs = chunks_per_core * (8 * sizes + tuning.chunk_cost) + tuning.uneven_cost * sizes + tuning.merge_cost * counts
    fewest = jnp.minimum(pl.cdiv(tiles, tuning.largest_chunk), most)[:, None]
    costs = jnp.where(counts >= fewest, costs, jnp.iinfo(jnp.int32).max)
    best = jnp.argmin(costs, axis=1).astype(jnp.int32) + 1
    return jnp.maximum(pl.cdiv(tiles, best), 1)
