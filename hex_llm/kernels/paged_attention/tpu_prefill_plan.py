"""How a step's prompts are dealt out to tiles of queries on TPUs."""

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.window import Window

# Of an item, after those that `tpu_blocks` knows: its tokens from, up to, and the position of the first.
START, STOP, POSITION = range(3, 6)


def plan_prefill(
    cu_q: Array,
    kv_len: Array,
    num_decode: Array | int,
    num_seqs: Array,
    *,
    num_tokens: int,
    tile: int,
    window: Window | None,
) -> tuple[Array, Array]:
    """The items [6, I], in order of their tokens, and how many there are, [1]: the tokens of a sequence in a tile."""
    begin, end = cu_q[:-1], cu_q[1:]
    sequence = jnp.arange(kv_len.shape[0], dtype=jnp.int32)
    prompt = (sequence >= num_decode) & (sequence < num_seqs) & (end > begin)
    # An item begins with a prompt or with a tile.
    edge = jnp.arange(0, num_tokens, tile, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum((end[None, :] <= edge[:, None]).astype(jnp.int32), axis=1), kv_len.shape[0] - 1)
    inside = prompt[owner] & (begin[owner] < edge) & (edge < end[owner])
    start = jnp.concatenate([jnp.where(inside, edge, num_tokens), jnp.where(prompt, begin, num_tokens)])
    row = jnp.concatenate([owner, sequence])
    order = jnp.argsort(start)
    start, row = start[order], row[order]
    real = start < num_tokens
    stop = jnp.minimum(end[row], (start // tile + 1) * tile)
    position = kv_len[row] - (end[row] - start)
    first = jnp.zeros_like(position) if window is None else window.first(position)
    fields = jnp.stack([row, first, position + stop - start, start, stop, position])
    return jnp.where(real[None, :], fields, 0), jnp.sum(real, dtype=jnp.int32).reshape(1)
