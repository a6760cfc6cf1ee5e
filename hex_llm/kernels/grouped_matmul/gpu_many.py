"""The experts of a large batch on Hopper, at the speed of its tensor cores.

Rows are in order of their experts (`groups`), so that a tile of rows is multiplied with one expert's weight. One block
runs on each SM and goes from tile to tile of the result: one warpgroup brings rows and weights by TMA through a ring of
shared memory, two multiply. Tiles that run at the same time lie in a band of few rows and few columns, which share most
of what they read in the L2 cache. Gate and up of the same columns are multiplied side by side, so that only what the
gate lets through is written.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.gpu_gate import gated
from hex_llm.kernels.grouped_matmul.gpu_band import in_bands
from hex_llm.kernels.grouped_matmul.groups import Groups, combine, group_rows
from hex_llm.kernels.hopper import MMA_ROWS, num_sms

WORKERS = 2  # warpgroups that multiply
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # together at most what the launch took, or it hangs
SHARED_BYTES = 226 * 1024
STAGES = 2  # of the result, on its way out
FEW_ROWS = 96  # of an expert, on average: with fewer, a tile of 128 is mostly padding


@dataclass(frozen=True)
class Plan:
    """How a grouped product is cut."""

    rows: int  # of a tile: 128, a warpgroup has half of them; or 64, a warpgroup has half of the columns
    columns: int  # of the weight, for one warpgroup at a time; of the gate and up together
    band: int = 2048  # rows whose tiles run side by side
    depth: int = 64  # of a slot of the ring
    slots: int | None = None  # of the ring; as many as fit if not given
    blocks: int | None = None  # at a time; one for each SM if not given

    @property
    def slabs(self) -> int:
        """Pieces of the weight in a slot: one that both warpgroups use, or one for each."""
        return WORKERS * MMA_ROWS // self.rows

    def results(self, weights: int) -> int:
        """Columns of the result of one warpgroup."""
        return self.columns // weights

    def chunk(self, weights: int) -> int:
        """Columns of the result that are on their way out at once."""
        return 64 if self.results(weights) % 64 == 0 else 32

    def ring_slots(self, weights: int) -> int:
        out = WORKERS * STAGES * MMA_ROWS * self.chunk(weights) * 2
        slot = (self.rows + self.slabs * self.columns) * self.depth * 2
        return self.slots or (SHARED_BYTES - out) // slot


def tile_rows(rows: int, num_experts: int) -> int:
    """Rows of a tile, for so many rows of all experts."""
    return 2 * MMA_ROWS if rows >= FEW_ROWS * num_experts else MMA_ROWS


def plan_for(rows: int, out: int, *, weights: int) -> Plan:
    """The plan for tiles of so many rows and a result of `out` columns, a multiple of 64."""
    widths = (256, 192, 128, 64) if rows == 2 * MMA_ROWS else (128, 192, 96, 64, 32)
    plans = [Plan(rows=rows, columns=columns) for columns in widths if columns % (32 * weights) == 0]
    return next(plan for plan in plans if out % (plan.results(weights) * plan.slabs) == 0)


def experts(
    x: Array,
    gate_up: Array,
    gate_up_bias: Array | None,
    down: Array,
    chosen: Array,
    share: Array,
    *,
    activation: Activation,
    plans: tuple[Plan, Plan] | None = None,
) -> Array:
    """As `reference.experts`, but [1, T, D] in the type of `x`."""
    num_experts, width, size = down.shape
    if plans is None:
        rows = tile_rows(chosen.size, num_experts)
        plans = plan_for(rows, size, weights=2), plan_for(rows, width, weights=1)
    groups = group_rows(chosen, num_experts, plans[0].rows)
    hidden = product(x[groups.token], gate_up, gate_up_bias, groups, activation=activation, plan=plans[0])
    out = product(hidden, down, None, groups, plan=plans[1])
    return combine(out, groups, share).astype(x.dtype)[None]


@functools.partial(jax.jit, static_argnames=("activation", "plan"))
def product(
    x: Array, weight: Array, bias: Array | None, groups: Groups, *, activation: Activation | None = None, plan: Plan
) -> Array:
    """[rows, in] x [E, out, in] -> [rows, out] in the type of `x`; rows past the last tile are not written.

    With an activation the weight is [E, 2F, in], the result [rows, F]: what the gate, whose rows come first, lets
    through. Only then there may be a bias, [E, 2F].
    """
    weights = 2 if activation else 1
    size, out = x.shape[1], weight.shape[1] // weights
    slab = plan.results(weights)  # columns of the result of one warpgroup
    stride = slab * plan.slabs  # columns of one piece of work
    across, steps, slots = out // stride, size // plan.depth, plan.ring_slots(weights)
    band = max(1, plan.band // plan.rows)
    blocks = min(plan.blocks or num_sms(), groups.expert.shape[0] * across)

    def body(x_ref, w_ref, count_ref, expert_ref, *refs):
        bias_ref, refs = (refs[0], refs[1:]) if bias is not None else (None, refs)
        out_ref, x_ring, w_ring, staged, full, empty = refs
        block, worker = lax.axis_index("block"), lax.axis_index("worker")
        count = count_ref[0]
        pieces = lax.div(count * across - block + blocks - 1, blocks)

        def place(piece):
            """(tile, first row, first column of the result) of a piece of work."""
            tile, column = in_bands(block + piece * blocks, count, across, band)
            return tile, tile * plan.rows, column * stride

        @pl.when(worker == WORKERS)
        def _memory():
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

            @pl.loop(0, pieces)
            def _(piece):
                tile, first_row, first = place(piece)
                expert = expert_ref[tile]

                @pl.loop(0, steps)
                def _(step):
                    number = piece * steps + step
                    slot = lax.rem(number, slots)
                    columns = pl.ds(step * plan.depth, plan.depth)
                    pl.when(number >= slots)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    rows = pl.ds(first_row, plan.rows)
                    plgpu.copy_gmem_to_smem(x_ref.at[rows, columns], x_ring.at[slot], full.at[slot])
                    for i in range(plan.slabs):
                        for j in range(weights):
                            source = w_ref.at[expert, pl.ds(first + i * slab + j * out, slab), columns]
                            target = w_ring.at[slot, pl.ds(i * plan.columns + j * slab, slab)]
                            plgpu.copy_gmem_to_smem(source, target, full.at[slot])

            # Nothing is left under way when the block ends.
            @pl.loop(jnp.maximum(pieces * steps - slots, 0), pieces * steps)
            def _(number):
                plgpu.barrier_wait(empty.at[lax.rem(number, slots)])

        @pl.when(worker < WORKERS)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            row, column = (worker * MMA_ROWS, 0) if plan.slabs == 1 else (0, worker)

            @pl.loop(0, pieces)
            def _(piece):
                def accumulate(sums):
                    @pl.loop(0, steps)
                    def _(step):
                        number = piece * steps + step
                        slot = lax.rem(number, slots)
                        plgpu.barrier_wait(full.at[slot])
                        right = w_ring.at[slot, pl.ds(column * plan.columns, plan.columns)].transpose((1, 0))
                        plgpu.wgmma(sums, x_ring.at[slot, pl.ds(row, MMA_ROWS)], right)
                        # The slot before is free once all but this step's product are done.
                        plgpu.wgmma_wait(1)
                        pl.when(step > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(number - 1, slots)]))

                    return sums[...]

                sums = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((MMA_ROWS, plan.columns), jnp.float32))
                plgpu.barrier_arrive(empty.at[lax.rem(piece * steps + steps - 1, slots)])
                tile, first_row, first = place(piece)
                first += column * slab
                result = sums
                if activation:
                    halves = [sums[:, :slab], sums[:, slab:]]
                    if bias_ref is not None:
                        expert = expert_ref[tile]
                        halves = [
                            _add_to_columns(half, bias_ref.at[expert, pl.ds(first + j * out, slab)])
                            for j, half in enumerate(halves)
                        ]
                    result = gated(activation, *halves)
                _store(
                    result.astype(x.dtype),
                    staged.at[worker],
                    out_ref.at[pl.ds(first_row + row, MMA_ROWS)],
                    first,
                )

            plgpu.wait_smem_to_gmem(0)

    chunk = plan.chunk(weights)
    kernel = plgpu.kernel(
        body,
        kernel_name=f"experts_{out}x{size}",
        out_type=jax.ShapeDtypeStruct((x.shape[0], out), x.dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=WORKERS + 1,
        thread_name="worker",
        scratch_types=[
            plgpu.SMEM((slots, plan.rows, plan.depth), x.dtype, transforms=_swizzled(plan.depth)),
            plgpu.SMEM((slots, plan.slabs * plan.columns, plan.depth), x.dtype, transforms=_swizzled(plan.depth)),
            plgpu.SMEM((WORKERS, STAGES, MMA_ROWS, chunk), x.dtype, transforms=_swizzled(chunk)),
            plgpu.Barrier(num_arrivals=1 + plan.slabs * weights, num_barriers=slots),
            plgpu.Barrier(num_arrivals=WORKERS, num_barriers=slots),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    arrays = [x, weight, groups.num_tiles, groups.expert] + ([] if bias is None else [bias])
    return kernel(*arrays)


def _swizzled(columns: int) -> tuple:
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(columns * 2)  # pyright: ignore[reportAbstractUsage]


def _add_to_columns(sums: Array, bias_ref: Any) -> Array:
    bias = plgpu.load(bias_ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False).astype(jnp.float32)
    return sums + lax.broadcast_in_dim(bias, sums.shape, [1])


def _store(result: Array, staged: Any, out: Any, first: Array) -> None:
    """Copies the rows of a warpgroup out, from their column `first` on, while it goes on."""
    chunk = staged.shape[2]
    chunks = result.shape[1] // chunk
    for i in range(chunks):
        stage = staged.at[i % STAGES]
        # The copy before the last one has left its place; or the last one, where that has the same.
        plgpu.wait_smem_to_gmem(STAGES - 1 if i or chunks % STAGES == 0 else 0, wait_read_only=True)
        stage[...] = result[:, i * chunk : (i + 1) * chunk]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage, out.at[:, pl.ds(first + i * chunk, chunk)])
