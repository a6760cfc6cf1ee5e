"""Between the two products with adapters on Hopper: parts of sums are added, and of each token what its own adapter has
made of it is kept. A block has a token and a part of the weight, and reads of it no other slot's."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.gpu_warps import WARPS, warp_per_row


def does_rank(rank: int) -> bool:
    """Whether the lanes of a warp can share so many numbers."""
    return rank % 2 == 0


@functools.partial(jax.jit, static_argnames="dtype")
def keep_own(sums: Array, slot: Array, dtype: jnp.dtype) -> Array:
    """[n, M, parts, slots, rank] float32, to be added -> [M, parts, slots, rank], zeros but in each token's own slot.

    `slot` [T] numbers them from 1; 0 is none, which rows past T have, too. It is there before the first layer begins.
    """
    splits, rows, parts, slots, rank = sums.shape
    tokens = slot.shape[0]
    group = math.gcd(slots, WARPS)  # of slots, that are written together
    layout = warp_per_row(group, rank)

    def body(sums_ref, slot_ref, out_ref):
        # The kernel behind may come now: it waits for the end of this one before it reads what this one writes.
        plgpu.griddepcontrol_launch_dependents()
        token, part = lax.axis_index("token"), lax.axis_index("part")
        number = jnp.where(token < tokens, slot_ref[jnp.minimum(token, tokens - 1)], 0)
        own = jnp.maximum(number - 1, 0)
        plgpu.griddepcontrol_wait()

        def load(split):
            return plgpu.load(sums_ref.at[split, token, part, own], layout=layout.reduce(0), optimized=False)

        added = functools.reduce(jnp.add, [load(split) for split in range(splits)])
        kept = lax.broadcast_in_dim(added.astype(dtype), (group, rank), [1])
        numbers = plgpu.broadcasted_iota(jnp.int32, (group, rank), 0, layout=layout) + 1
        for first in range(0, slots, group):
            # Chosen, not multiplied by 0: a sum of no slot's may be no number.
            values = jnp.where(numbers + first == number, kept, jnp.zeros_like(kept))
            out_ref[token, part, pl.ds(first, group)] = values

    kernel = plgpu.kernel(
        body,
        kernel_name="keep_own",
        out_type=jax.ShapeDtypeStruct((rows, parts, slots, rank), dtype),
        grid=(rows, parts),
        grid_names=("token", "part"),
    )
    return kernel(sums, slot)
