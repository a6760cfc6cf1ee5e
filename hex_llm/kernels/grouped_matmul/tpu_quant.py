"""The experts of a layer on TPUs with weights in few bits: `quant_matmul`'s product, on rows in order of their experts.

A tile of rows is a block of tokens with a weight of its own, so that an expert that nobody has chosen is not read, and
one that few have chosen is read once.
"""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation, gated
from hex_llm.kernels.grouped_matmul.groups import combine, group_rows
from hex_llm.kernels.quant_matmul.tpu import product, sizes_for
from hex_llm.kernels.quant_matmul.tpu_sizes import MOST_TOKENS, SUBLANES
from hex_llm.kernels.quant_matmul.weight import Matrix, Packed


def supports(x: Array, gate_up: Matrix, down: Matrix) -> bool:
    """Whether the weights lie as the product takes them."""
    return all(isinstance(each, Packed) and each.layout == "tpu" for each in (gate_up, down))


def experts(
    x: Array,
    gate_up: Packed,
    gate_up_bias: Array | None,
    down: Packed,
    chosen: Array,
    share: Array,
    *,
    activation: Activation,
) -> Array:
    """As `reference.experts` of what the weights stand for, but [1, T, D] in the type of `x`."""
    num_experts = down.shape[0]
    tokens, k = chosen.shape
    tile = min(_tile(tokens, k, num_experts), *(sizes_for(MOST_TOKENS, each).tokens for each in (gate_up, down)))
    groups = group_rows(chosen, num_experts, tile)

    def multiplied(rows: Array, weight: Packed) -> Array:
        return product(rows, weight, groups.expert, groups.num_tiles, sizes_for(tile, weight), dtype=jnp.float32)

    both = multiplied(x[groups.token], gate_up)
    if gate_up_bias is not None:
        both += gate_up_bias[jnp.repeat(groups.expert, tile)].astype(jnp.float32)
    size = both.shape[1] // 2
    hidden = gated(activation, both[:, :size], both[:, size:]).astype(x.dtype)
    return combine(multiplied(hidden, down), groups, share).astype(x.dtype)[None]


def _tile(tokens: int, k: int, num_experts: int) -> int:
    """Rows of a tile: twice what an expert gets on average. A second tile has the expert's weights read again, and rows
    that are not there cost little next to that."""
    tile = SUBLANES
    while tile < MOST_TOKENS and tile < tokens and tile * num_experts < 2 * tokens * k:
        tile *= 2
    return tile
