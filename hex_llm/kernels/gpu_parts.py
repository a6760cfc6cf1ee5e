"""Warpgroups of a block on Hopper that share a row: where rows are few, one alone is slow."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

MOST = 4
NAME = "part"  # of the axis


class Parts(NamedTuple):
    """What the warpgroups of a block tell each other."""

    number: int
    told: Any  # [turns, number] float32, in shared memory; None where there is one
    barriers: Any  # one for each turn

    def over_all(self, reduce: Callable[[Array, Array], Array], value: Array, turn: int = 0) -> Array:
        """Of each one's value, in order. Each turn is taken once."""
        if self.number == 1:
            return value
        self.told[turn, own_part()] = value
        barrier = self.barriers.at[turn]
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return functools.reduce(reduce, [self.told[turn, i] for i in range(self.number)])


def own_part() -> Array:
    return lax.axis_index(NAME)


def most_parts(fits: Callable[[int], bool]) -> int:
    return next((n for n in (MOST, MOST // 2) if fits(n)), 1)


def scratch(count: int, turns: int) -> list[Any]:
    """The memory that `Parts` has."""
    if count == 1:
        return [None, None]
    return [plgpu.SMEM((turns, count), jnp.float32), plgpu.Barrier(num_arrivals=count, num_barriers=turns)]
