"""Warpgroups of a block on Hopper that share a row: where rows are few, one alone is slow."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.gpu_warps import WARPS

MOST = 4
NAME = "part"  # of the axis


class Parts(NamedTuple):
    """What the warps of a block tell each other.

    Mosaic has a place in shared memory for what the warps of a warpgroup reduce together, and that is the same one for
    all of a block. So an array is to be reduced to a number for each warp, and here for the rest.
    """

    number: int
    told: Any  # [turns, number, WARPS] float32, in shared memory
    barriers: Any  # one for each turn

    def over_all(self, reduce: Callable[[Array, Array], Array], of_warps: Array, turn: int = 0) -> Array:
        """Of the numbers [WARPS] of each one, in order. Each turn is taken once."""
        self.told.at[turn, own_part()][...] = of_warps
        barrier = self.barriers.at[turn]
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return functools.reduce(
            reduce, [self.told[turn, part, warp] for part in range(self.number) for warp in range(WARPS)]
        )


def own_part() -> Array:
    return lax.axis_index(NAME)


def most_parts(fits: Callable[[int], bool]) -> int:
    return next((n for n in (MOST, MOST // 2) if fits(n)), 1)


def scratch(number: int, turns: int) -> list[Any]:
    """The memory that `Parts` has."""
    return [
        plgpu.SMEM((turns, number, WARPS), jnp.float32),
        plgpu.Barrier(num_arrivals=number, num_barriers=turns),
    ]
