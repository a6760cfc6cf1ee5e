"""A block of the Hopper kernels for few tokens: weights stream through a ring of shared memory and are multiplied.

One warpgroup copies, and does not stop between one piece of work and the next; each of the others multiplies 64 rows of
the weight, or of two weights, with all tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.hopper import MMA_ROWS

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


@dataclass(frozen=True)
class Ring:
    slots: int
    weights: int  # that are multiplied side by side, each into sums of its own
    rows: int  # of each weight
    depth: int  # columns of a slot
    tokens: int
    dtype: Any

    @property
    def workers(self) -> int:
        """Warpgroups that multiply."""
        return self.rows // MMA_ROWS

    def scratch(self) -> list[Any]:
        return [
            plgpu.SMEM((self.slots, self.tokens, self.depth), self.dtype, transforms=SWIZZLED),
            plgpu.SMEM((self.slots, self.weights * self.rows, self.depth), self.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=self.weights + 1, num_barriers=self.slots),
            plgpu.Barrier(num_arrivals=self.workers, num_barriers=self.slots),
        ]


class Work(NamedTuple):
    """What a block does: for each piece a sum over steps, each a copy of some columns of the weights and of `x`."""

    pieces: Array
    steps: Array | int  # of a piece
    weights: Callable[[Array, Array], list[Any]]  # (piece, step) -> where the rows of each weight are
    x: Callable[[Array, Array], Any]  # (piece, step) -> where the columns of all tokens are
    finish: Callable[[Array, Array, list[Array]], None]  # (piece, worker, sums [64, tokens] of each weight)
    early: bool  # whether the weights, and which, are known before the kernel in front has ended


def run(ring: Ring, work: Callable[[], Work], x_ring: Any, w_ring: Any, full: Any, empty: Any) -> None:
    """`work` is called where its pieces are known, by each warpgroup."""
    worker = lax.axis_index("worker")
    pl.when(worker == ring.workers)(lambda: _copy(ring, work, x_ring, w_ring, full, empty))
    pl.when(worker < ring.workers)(lambda: _multiply(ring, work, worker, x_ring, w_ring, full, empty))


def _copy(ring: Ring, make_work: Callable[[], Work], x_ring: Any, w_ring: Any, full: Any, empty: Any) -> None:
    def copy_weights(piece: Array, step: Array, slot: Array) -> None:
        for i, source in enumerate(work.weights(piece, step)):
            plgpu.copy_gmem_to_smem(source, w_ring.at[slot, pl.ds(i * ring.rows, ring.rows)], full.at[slot])

    def copy_x(piece: Array, step: Array, slot: Array) -> None:
        plgpu.copy_gmem_to_smem(work.x(piece, step), x_ring.at[slot], full.at[slot])

    work = make_work()
    ahead = jnp.minimum(ring.slots, work.steps) if work.early else 0
    if work.early:
        pl.loop(0, ahead)(lambda step: copy_weights(jnp.int32(0), step, step))
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
        pl.loop(0, ahead)(lambda step: copy_x(jnp.int32(0), step, step))
    else:
        plgpu.griddepcontrol_launch_dependents()

    @pl.loop(0, work.pieces)
    def _(piece):
        @pl.loop(lax.select(piece == 0, ahead, 0) if work.early else 0, work.steps)
        def _(step):
            count = piece * work.steps + step
            slot = lax.rem(count, ring.slots)
            pl.when(count >= ring.slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
            copy_weights(piece, step, slot)
            copy_x(piece, step, slot)

    # Nothing is left under way when the block ends.
    steps = work.pieces * work.steps

    @pl.loop(jnp.maximum(steps - ring.slots, 0), steps)
    def _(count):
        plgpu.barrier_wait(empty.at[lax.rem(count, ring.slots)])


def _multiply(
    ring: Ring, make_work: Callable[[], Work], worker: Array, x_ring: Any, w_ring: Any, full: Any, empty: Any
) -> None:
    work = make_work()

    @pl.loop(0, work.pieces)
    def _(piece):
        first = piece * work.steps

        def accumulate(*sums):
            @pl.loop(0, work.steps)
            def _(step):
                slot = lax.rem(first + step, ring.slots)
                plgpu.barrier_wait(full.at[slot])
                for i, each in enumerate(sums):
                    rows = pl.ds(i * ring.rows + worker * MMA_ROWS, MMA_ROWS)
                    plgpu.wgmma(each, w_ring.at[slot, rows], x_ring.at[slot].transpose((1, 0)))
                # The slot before is free once all but this step's products are done.
                plgpu.wgmma_wait(ring.weights)
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(first + step - 1, ring.slots)]))

            return [each[...] for each in sums]

        accumulator = plgpu.WGMMAAccumulatorRef((MMA_ROWS, ring.tokens), jnp.float32)
        sums = pl.run_scoped(accumulate, *[accumulator] * ring.weights)
        plgpu.barrier_arrive(empty.at[lax.rem(first + work.steps - 1, ring.slots)])
        work.finish(piece, worker, sums)
