"""Blocks of a cluster that each have a part of the same sums add them up among themselves.

Each block gets some columns of the sums to add up. The others write their parts of these into its shared memory, where
it adds them in the order of the blocks: the sum does not depend on who comes first. So what leaves the chip is the sum,
once, and not every part of it, for the next kernel to read.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels import gpu_mates
from hex_llm.kernels.quant_matmul.weight import HOPPER_ROWS


class Join(NamedTuple):
    """Of what the warpgroups of a cluster's blocks have: each `stack` sums [64, tokens]."""

    blocks: int
    workers: int
    stack: int
    tokens: int

    @property
    def columns(self) -> int:
        """Of one sum, that a block adds up: of all of them it has as many as each other block."""
        each = self.stack * self.tokens // self.blocks
        fits = each % 8 == 0 and max(each, self.tokens) % min(each, self.tokens) == 0
        assert fits, f"{self} has {each} columns for each block, of sums of {self.tokens}"
        return min(each, self.tokens)

    @property
    def share(self) -> int:
        """Sums of which a block adds up these columns."""
        return self.stack * self.tokens // self.columns // self.blocks

    @property
    def num_bytes(self) -> int:
        return self.workers * self.stack * HOPPER_ROWS * self.tokens * 4

    def scratch(self) -> tuple[Any, Any]:
        """What a block is sent, by warpgroup and sender, and barriers that tell when all is there."""
        shape = self.workers, self.blocks, self.share, HOPPER_ROWS, self.columns
        arrivals = self.blocks * self.share
        return (
            plgpu.SMEM(shape, jnp.float32, transforms=swizzled(self.columns)),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.workers),
        )

    def send(self, sums: list[Array], inbox: Any, arrived: Any, worker: Array, block: Array) -> None:
        """From this block to each its columns."""
        for number in range(self.blocks * self.share):
            which, first = divmod(number * self.columns, self.tokens)
            to, place = divmod(number, self.share)
            part = lax.slice(sums[which], (0, first), (HOPPER_ROWS, first + self.columns))
            target = inbox.at[worker, block, place]
            plgpu.async_store_smem(
                part, target, arrived.at[worker], cluster_idx=jnp.int32(to), cluster_dim=gpu_mates.AXIS
            )

    def added(self, inbox: Any, arrived: Any, worker: Array, block: Array) -> Iterator[tuple[Array, Array, Array]]:
        """(which sum, first column, [64, columns]) of all that this block adds up."""
        plgpu.barrier_wait(arrived.at[worker])
        for place in range(self.share):
            start = (block * self.share + place) * self.columns
            parts = [plgpu.load(inbox.at[worker, i, place], layout=plgpu.Layout.WGMMA) for i in range(self.blocks)]
            yield lax.div(start, self.tokens), lax.rem(start, self.tokens), functools.reduce(jnp.add, parts)


def swizzled(columns: int) -> tuple[Any, ...]:
    """Of float32 numbers [64, columns]: in lines of 128 bytes, or as long as go into a row."""
    line = next(size for size in (32, 16, 8) if columns % size == 0)
    return plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(4 * line)  # pyright: ignore[reportAbstractUsage]
