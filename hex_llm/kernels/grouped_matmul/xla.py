"""The experts of a layer in plain XLA: a loop over the tiles of rows that there are, each with its one expert.

The work follows the rows: an expert that nobody has chosen is not read, and a loop has no more turns than tiles.
"""

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.activation import Activation, gated
from hex_llm.kernels.grouped_matmul.groups import combine, group_rows
from hex_llm.kernels.quant_matmul import xla as quant_matmul
from hex_llm.kernels.quant_matmul.layouts import unpack
from hex_llm.kernels.quant_matmul.reference import dequantize
from hex_llm.kernels.quant_matmul.weight import Matrix, Packed, of_expert
from hex_llm.parallel.backend import backend

LARGEST_TILE = 128


def experts(
    x: Array,
    gate_up: Matrix,
    gate_up_bias: Array | None,
    down: Matrix,
    chosen: Array,
    share: Array,
    *,
    activation: Activation,
) -> Array:
    """As `reference.experts`, but [1, T, D] in the type of `x`, to which each product is rounded."""
    tile = _tile(chosen.shape[0], chosen.shape[1], gate_up.shape[0])
    groups = group_rows(chosen, gate_up.shape[0], tile)

    def one_tile(index: Array, out: Array) -> Array:
        expert, first = groups.expert[index], index * tile
        rows = x[lax.dynamic_slice_in_dim(groups.token, first, tile)]
        both = _product(rows, gate_up, expert)
        if gate_up_bias is not None:
            both += lax.dynamic_slice_in_dim(gate_up_bias, expert, 1).astype(jnp.float32)
        size = both.shape[1] // 2
        hidden = gated(activation, both[:, :size], both[:, size:]).astype(x.dtype)
        result = _product(hidden, down, expert)
        return lax.dynamic_update_slice_in_dim(out, result.astype(x.dtype), first, axis=0)

    out = jnp.zeros((groups.token.shape[0], x.shape[1]), x.dtype)
    out = lax.fori_loop(0, groups.num_tiles[0], one_tile, out)
    return combine(out, groups, share).astype(x.dtype)[None]


def _tile(tokens: int, k: int, num_experts: int) -> int:
    """Rows of a tile: about what an expert gets, in a power of two."""
    tile = 1
    while tile < LARGEST_TILE and tile < tokens and tile * num_experts < 2 * tokens * k:
        tile *= 2
    return tile


def _product(rows: Array, weights: Matrix, expert: Array) -> Array:
    if isinstance(weights, Packed):
        if weights.layout == "plain":
            return quant_matmul.matmul(rows, weights, dtype=jnp.dtype(jnp.float32), expert=expert)
        # A kernel takes one of the two weights, but not the other; its layout may have more columns.
        weight = dequantize(unpack(of_expert(weights, expert)))[:, : rows.shape[1]].astype(rows.dtype)
    else:
        weight = lax.dynamic_index_in_dim(weights, expert, keepdims=False)
    if rows.shape[0] == 1 and weight.dtype.itemsize < 4 and backend() == "cpu":
        # As in `layers.linear`: a product would write out a float32 copy of the weight first.
        return jnp.sum(weight.astype(jnp.float32) * rows.astype(jnp.float32), axis=1)[None, :]
    return lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
