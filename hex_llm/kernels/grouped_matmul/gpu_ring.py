"""A block of the Hopper kernels that have weights on the left: these stream through a ring of shared memory and are
multiplied with tokens, which come beside them.

One warpgroup copies, and does not stop between one piece of work and the next; each of the others multiplies 64 rows of
the weight, or of two weights, with all tokens. How it takes those rows is its `Left`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.grouped_matmul.gpu_left import SWIZZLED, Left, Place
from hex_llm.kernels.hopper import MMA_ROWS


@dataclass(frozen=True)
class Ring:
    slots: int
    left: Left
    weights: int  # that are multiplied side by side, each into sums of its own
    tokens: int
    dtype: Any

    @property
    def workers(self) -> int:
        """Warpgroups that multiply."""
        return self.left.rows // MMA_ROWS

    def after(self, slot: Array) -> Array:
        return lax.select(slot == self.slots - 1, 0, slot + 1)

    def before(self, slot: Array) -> Array:
        return lax.select(slot == 0, self.slots - 1, slot - 1)

    def scratch(self) -> list[Any]:
        return [
            plgpu.SMEM((self.slots, self.tokens, self.left.depth), self.dtype, transforms=SWIZZLED),
            *self.left.scratch(self.slots),
            plgpu.Barrier(num_arrivals=self.weights * self.left.copies + 1, num_barriers=self.slots),
            plgpu.Barrier(num_arrivals=self.workers, num_barriers=self.slots),
        ]

    def kernel(self, body: Callable[..., None], shape: tuple[int, ...], dtype: Any, blocks: int) -> Any:
        """Of so many blocks, each of which is to `run`."""
        return plgpu.kernel(
            body,
            kernel_name=f"experts_{shape[-1]}",
            out_type=jax.ShapeDtypeStruct(shape, dtype),
            grid=(blocks,),
            grid_names=("block",),
            num_threads=self.workers + 1,
            thread_name="worker",
            scratch_types=self.scratch(),
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )


class Work(NamedTuple):
    """What a block does: for each piece a sum over steps, each a copy of some columns of the weights and of `x`."""

    pieces: Array
    steps: Array | int  # of a piece
    refs: list[Any]  # of the weights, as their `Left` takes them
    weights: Callable[[Array, Array], list[Place]]  # (piece, step) -> where the rows of each weight are
    x: Callable[[Array, Array], Any]  # (piece, step) -> where the columns of all tokens are
    finish: Callable[[Array, Array, list[Array]], None]  # (piece, worker, sums [64, tokens] of each weight)
    early: bool  # whether the weights, and which, are known before the kernel in front has ended


def run(ring: Ring, work: Callable[[], Work], x_ring: Any, *scratch: Any) -> None:
    """`work` is called where its pieces are known, by each warpgroup."""
    *rings, full, empty = scratch
    worker = lax.axis_index("worker")
    pl.when(worker == ring.workers)(lambda: _copy(ring, work, x_ring, rings, full, empty))
    pl.when(worker < ring.workers)(lambda: _multiply(ring, work, worker, x_ring, rings, full, empty))


def _copy(ring: Ring, make_work: Callable[[], Work], x_ring: Any, rings: list[Any], full: Any, empty: Any) -> None:
    def copy_weights(piece: Array, step: Array, slot: Array) -> None:
        for i, place in enumerate(work.weights(piece, step)):
            ring.left.copy(work.refs, place, rings, slot, i, full.at[slot])

    def copy_x(piece: Array, step: Array, slot: Array) -> None:
        plgpu.copy_gmem_to_smem(work.x(piece, step), x_ring.at[slot], full.at[slot])

    if ring.left.registers is not None:
        plgpu.set_max_registers(ring.left.registers[0], action="decrease")
    work = make_work()
    ahead = jnp.minimum(ring.slots, work.steps) if work.early else 0
    if work.early:
        pl.loop(0, ahead)(lambda step: copy_weights(jnp.int32(0), step, step))
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
        pl.loop(0, ahead)(lambda step: copy_x(jnp.int32(0), step, step))
    else:
        plgpu.griddepcontrol_launch_dependents()

    def copy_piece(piece: Array, slot: Array) -> Array:
        def copy_step(step: Array, slot: Array) -> Array:
            pl.when(piece * work.steps + step >= ring.slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
            copy_weights(piece, step, slot)
            copy_x(piece, step, slot)
            return ring.after(slot)

        return lax.fori_loop(lax.select(piece == 0, ahead, 0) if work.early else 0, work.steps, copy_step, slot)

    slot = lax.select(ahead == ring.slots, 0, ahead) if work.early else 0
    slot = lax.fori_loop(0, work.pieces, copy_piece, jnp.int32(slot))

    # Nothing is left under way when the block ends.
    def wait_for(_: Array, slot: Array) -> Array:
        plgpu.barrier_wait(empty.at[slot])
        return ring.after(slot)

    # The oldest that is still in use; where the ring was never full, that is the first.
    in_use = jnp.minimum(work.pieces * work.steps, ring.slots)
    lax.fori_loop(0, in_use, wait_for, lax.select(in_use == ring.slots, slot, 0))


def _multiply(
    ring: Ring, make_work: Callable[[], Work], worker: Array, x_ring: Any, rings: list[Any], full: Any, empty: Any
) -> None:
    if ring.left.registers is not None:
        plgpu.set_max_registers(ring.left.registers[1], action="increase")
    work = make_work()

    def multiply_piece(piece: Array, slot: Array) -> Array:
        def accumulate(*sums):
            def multiply_step(step: Array, slot: Array) -> Array:
                plgpu.barrier_wait(full.at[slot])

                def free_the_one_before():
                    pl.when(step > 0)(lambda: plgpu.barrier_arrive(empty.at[ring.before(slot)]))

                ring.left.multiply(sums, rings, x_ring, slot, worker, free_the_one_before)
                return ring.after(slot)

            end = lax.fori_loop(0, work.steps, multiply_step, slot)
            return [each[...] for each in sums], ring.before(end)

        accumulator = plgpu.WGMMAAccumulatorRef((MMA_ROWS, ring.tokens), jnp.float32)
        sums, last = pl.run_scoped(accumulate, *[accumulator] * ring.weights)
        plgpu.barrier_arrive(empty.at[last])
        work.finish(piece, worker, sums)
        return ring.after(last)

    lax.fori_loop(0, work.pieces, multiply_piece, jnp.int32(0))
