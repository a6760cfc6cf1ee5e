"""The experts of a layer on TPUs: JAX's own grouped product, on rows in order of their experts."""

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

from hex_llm.kernels.activation import Activation, gated
from hex_llm.kernels.grouped_matmul.groups import combine, group_rows
from hex_llm.kernels.quant_matmul.weight import Matrix, Packed

LANES, SUBLANES = 128, 16  # a tile of bf16
# Of rows, the first that experts fill; of columns and of what is summed over, the first that divides, or the largest,
# of which the last is then not full.
TILES = (512, 256, 128)


def supports(x: Array, gate_up: Matrix, down: Matrix) -> bool:
    """Whether the product does these types and sizes."""
    if isinstance(gate_up, Packed) or isinstance(down, Packed):
        return False
    _, width, size = down.shape
    typed = x.dtype == gate_up.dtype == down.dtype and x.dtype in (jnp.bfloat16, jnp.float32)
    return typed and min(width, size) >= LANES


def experts(
    x: Array,
    gate_up: Array,
    gate_up_bias: Array | None,
    down: Array,
    chosen: Array,
    share: Array,
    *,
    activation: Activation,
    interpret: bool = False,
) -> Array:
    """As `reference.experts`, but [1, T, D] in the type of `x`."""
    num_experts = down.shape[0]
    rows_per_expert = chosen.size // num_experts
    tile = next((tile for tile in TILES if tile <= rows_per_expert), TILES[-1])
    groups = group_rows(chosen, num_experts, tile)
    sizes = (groups.counts + tile - 1) // tile * tile

    def product(rows: Array, weight: Array) -> Array:
        _, out, summed = weight.shape
        columns, depth = (next((n for n in TILES if size % n == 0), TILES[0]) for size in (out, summed))
        lies_turned = _lies_turned(out, summed)
        return gmm(
            rows,
            weight.swapaxes(1, 2) if lies_turned else weight,
            sizes,
            jnp.float32,
            tiling=(tile, min(depth, summed), min(columns, out)),
            transpose_rhs=not lies_turned,
            interpret=interpret,
        )

    both = product(x[groups.token], gate_up)
    if gate_up_bias is not None:
        expert = jnp.repeat(groups.expert, tile)
        both += gate_up_bias[expert].astype(jnp.float32)
    size = both.shape[1] // 2
    hidden = gated(activation, both[:, :size], both[:, size:]).astype(x.dtype)
    return combine(product(hidden, down), groups, share).astype(x.dtype)[None]


def _lies_turned(rows: int, columns: int) -> bool:
    """Whether XLA keeps a [rows, columns] matrix column by column, as it does where that fills tiles better. A kernel
    that takes it otherwise gets a copy of all the weights, made anew in every step.
    """

    def tiles(rows: int, columns: int) -> int:
        return -(-rows // SUBLANES) * -(-columns // LANES)

    return tiles(columns, rows) < tiles(rows, columns)
