"""Blocks of a cluster that need the same tokens at the same time: each fetches a share of them, which goes to all.

So the L2 cache gives them once for each cluster, and not once for each block. A mate writes to this block's ring, too:
a slot is free for it when the slots of all mates are.
"""

from typing import Any

from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

AXIS = "mate"


def grid(blocks: int, mates: int) -> dict[str, Any]:
    """Of a kernel of so many blocks, of which a cluster has `mates`."""
    assert blocks % mates == 0, f"{blocks} blocks are not clusters of {mates}"
    sizes: dict[str, Any] = {"grid": (blocks // mates,), "grid_names": ("block",)}
    return sizes if mates == 1 else sizes | {"cluster": (mates,), "cluster_names": (AXIS,)}


def block_index(mates: int) -> Array:
    block = lax.axis_index("block")
    return block if mates == 1 else block * mates + lax.axis_index(AXIS)


def fetch(source: Any, target: Any, barrier: Any, mates: int) -> None:
    """To the target of every mate, each of which calls this for the same source, and whose barriers know of it."""
    plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=None if mates == 1 else AXIS)


def freed(mates: int, *, workers: int, slots: int) -> Any:
    """A barrier for each slot, at which the workers of all mates arrive."""
    if mates == 1:
        return plgpu.Barrier(num_arrivals=workers, num_barriers=slots)
    return plgpu.ClusterBarrier(collective_axes=(AXIS,), num_arrivals=workers, num_barriers=slots)
