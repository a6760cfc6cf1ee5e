"""The rows of a batch put in order of their experts, so that each tile of rows has one expert.

A token's row is there once for each of its experts. The rows of an expert are followed by padding up to a whole tile.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array

from hex_llm.pytree import pytree

BLOCK = 128  # tokens that are counted by one product; up to so many, every type of number counts exactly


@pytree
class Groups:
    expert: Array  # [tiles] int32: of a tile
    num_tiles: Array  # [1] int32: the tiles that have rows
    token: Array  # [rows] int32: of a row; padding is any token
    row: Array  # [T, k] int32: where a token's row for its k-th expert is
    counts: Array  # [E] int32: the rows of an expert without padding


def most_tiles(tokens: int, k: int, num_experts: int, tile: int) -> int:
    """The number of tiles that no choice of experts exceeds."""
    rows, groups = tokens * k, min(num_experts, tokens * k)
    return min((rows + groups * (tile - 1)) // tile, num_experts * -(-tokens // tile))


def group_rows(chosen: Array, num_experts: int, tile: int) -> Groups:
    """Groups the rows of tokens with these experts [T, k]."""
    tokens, k = chosen.shape
    before, counts = _counted(chosen, num_experts)
    tiles = (counts + tile - 1) // tile
    ends = jnp.sum(jnp.where(np.tri(num_experts, dtype=bool), tiles[None, :], 0), axis=1)
    rank = jnp.take_along_axis(before, chosen, axis=1)
    row = (ends - tiles)[chosen] * tile + rank
    most = most_tiles(tokens, k, num_experts, tile)
    index = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.sum((ends[None, :] <= index[:, None]).astype(jnp.int32), axis=1)
    token = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], row.shape)
    return Groups(
        expert=jnp.minimum(expert, num_experts - 1),
        num_tiles=ends[-1:],
        token=jnp.zeros(most * tile, jnp.int32).at[row].set(token, unique_indices=True, mode="promise_in_bounds"),
        row=row,
        counts=counts,
    )


def combine(rows: Array, groups: Groups, share: Array) -> Array:
    """[T, D] float32: each token's rows of [rows, D], each times its share, added."""
    terms = (
        rows[groups.row[:, j]].astype(jnp.float32) * share[:, j].astype(jnp.float32)[:, None]
        for j in range(share.shape[1])
    )
    return functools.reduce(jnp.add, terms)


def _counted(chosen: Array, num_experts: int) -> tuple[Array, Array]:
    """The tokens before each one that have an expert, [T, E], and those of all, [E]: int32.

    As products with a triangle, because a scan is many small kernels, and a sort is more.
    """
    tokens = chosen.shape[0]
    ids = jnp.arange(num_experts, dtype=jnp.int32)
    has = functools.reduce(jnp.logical_or, [chosen[:, j, None] == ids[None, :] for j in range(chosen.shape[1])])
    blocks = -(-tokens // BLOCK)
    size = tokens if blocks == 1 else BLOCK
    ones = jnp.pad(has.astype(jnp.float32), ((0, blocks * size - tokens), (0, 0))).reshape(blocks, size, num_experts)
    within = jnp.einsum("st,bte->bse", np.tri(size, k=-1, dtype=np.float32), ones)
    totals = jnp.sum(ones, axis=1)
    ends = jnp.einsum("ab,be->ae", np.tri(blocks, dtype=np.float32), totals)
    before = within + (ends - totals)[:, None, :]
    return before.reshape(-1, num_experts)[:tokens].astype(jnp.int32), ends[-1].astype(jnp.int32)
