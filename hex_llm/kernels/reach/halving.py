"""The reach by halving the range in which it can lie, until every row is settled: fast where nobody waits for loops."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.reach.filters import Filters, reach_of_min_p
from hex_llm.kernels.reach.reference import chunked_depths, masses, totals
from hex_llm.pytree import pytree


def reach(logits: Array, filters: Filters) -> Array:
    """See `reference.reach`. It may be a longer one here, but not by a token."""
    depths = chunked_depths(logits, filters)

    def stage(number: Array, longest: Array) -> Array:
        """First top_k, by tokens that weigh 1 each, then top_p, by what is left of their mass."""
        counts = number == 0
        weights = jnp.where(counts, jnp.ones_like(depths), masses(depths))

        def target(total: Array) -> Array:
            return jnp.where(counts, filters.top_k, filters.top_p * total)

        return _halve(depths, weights, counts, longest, target)

    return lax.fori_loop(0, 2, stage, reach_of_min_p(filters))


@pytree
class _Bracket:
    """Where the reach lies: above `low`, at or below `high`, unless even that is too little."""

    turn: Array  # [] int32
    low: Array  # [S]
    high: Array  # [S]
    target: Array  # [S]
    total_high: Array  # [S]: the weights within `high`
    count_low: Array  # [S]: the tokens within `low`
    count_high: Array  # [S]


def _halve(depths: Array, weights: Array, counts: Array, longest: Array, target: Callable[[Array], Array]) -> Array:
    """A reach within which the weights add up to `target`, which is told their sum within `longest`, and that would
    not be enough with a token less."""

    def unsettled(state: _Bracket) -> Array:
        # Settled when all of them are too little or, as far as they are counted, just enough; and with one token left
        # between low and high.
        needed = (state.total_high > state.target) | (~counts & (state.total_high == state.target))
        return needed & (state.count_high - state.count_low > 1) & (state.high - state.low > 1)

    def turn(state: _Bracket) -> _Bracket:
        # The first turn looks at `high` itself, so that there is one place that adds up: each is a kernel to compile.
        first = state.turn == 0
        part = jnp.where(state.low > 0, 2.0, 4.0)  # a reach is more often short than long
        middle = jnp.where(first, state.high, state.low + jnp.maximum(jnp.floor((state.high - state.low) / part), 1))
        total, count = totals(depths, (weights, None), (middle, middle)).T
        wanted = jnp.where(first, target(total), state.target)
        fall = first | (unsettled(state) & (total >= wanted))
        rise = ~first & unsettled(state) & (total < wanted)
        return _Bracket(
            turn=state.turn + 1,
            low=jnp.where(rise, middle, state.low),
            high=jnp.where(fall, middle, state.high),
            target=wanted,
            total_high=jnp.where(fall, total, state.total_high),
            count_low=jnp.where(rise, count, state.count_low),
            count_high=jnp.where(fall, count, state.count_high),
        )

    endless = jnp.full_like(longest, jnp.inf)
    zero = jnp.zeros_like(longest)
    start = _Bracket(
        turn=jnp.int32(0),
        low=zero,
        high=longest,
        target=zero,
        total_high=endless,
        count_low=zero,
        count_high=endless,
    )
    return lax.while_loop(lambda state: (state.turn == 0) | jnp.any(unsettled(state)), turn, start).high
