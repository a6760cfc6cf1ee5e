"""How far below its likeliest token a row's draw reaches, which is what top_k, top_p and min_p leave of a vocabulary.

Tokens are told apart by their depth, in whole grains: those in one grain stay or go together. A row's reach is the
least number of grains that hold enough tokens (top_k), and of those enough of their mass (top_p).
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.reach.filters import ALL, GRAIN, Filters, beside, depth, reach_of_min_p

_CHUNKS = 128
_WAYS = 8  # each pass over the logits divides by this the range in which the reach can lie


def reach(logits: Array, filters: Filters) -> Array:
    """The reach [S] float32 of logits [S, V], in grains. It takes 8 passes for top_k and 8 for top_p, whatever they
    are, and no control flow."""
    depths = chunked_depths(logits, filters)
    few = _least(depths, None, reach_of_min_p(filters), lambda _: filters.top_k)
    return _least(depths, masses(depths), few, lambda total: filters.top_p * total)


def chunked_depths(logits: Array, filters: Filters) -> Array:
    rows, vocab = logits.shape
    chunks = jnp.pad(logits, ((0, 0), (0, -vocab % _CHUNKS)), constant_values=-jnp.inf).reshape(rows, _CHUNKS, -1)
    return depth(chunks, filters)


def masses(depths: Array) -> Array:
    return jnp.exp(depths * -GRAIN)


def totals(depths: Array, weights: Sequence[Array | None], limits: Sequence[Array]) -> Array:
    """For each limit the sum of its weights within it, or how many tokens that are: [S, N], in one pass."""
    parts = [
        jnp.sum(jnp.where(depths < beside(limit, depths), 1.0 if weight is None else weight, 0.0), axis=-1)
        for weight, limit in zip(weights, limits, strict=True)
    ]
    return jnp.sum(jnp.stack(parts, axis=1), axis=-1)


def _least(depths: Array, weights: Array | None, longest: Array, target: Callable[[Array], Array]) -> Array:
    """The least reach within which the weights add up to `target`, which is told their sum within `longest`."""
    low, width = jnp.zeros_like(longest), ALL / _WAYS
    found = totals(depths, [weights] * _WAYS, [*_limits(low, width), longest])
    wanted = target(found[:, -1])
    while True:
        low += width * jnp.sum(found[:, : _WAYS - 1] < wanted[:, None], axis=-1, dtype=jnp.float32)
        if width == 1:
            return jnp.minimum(longest, low + 1)
        width /= _WAYS
        found = totals(depths, [weights] * (_WAYS - 1), _limits(low, width))


def _limits(low: Array, width: float) -> list[Array]:
    return [low + width * way for way in range(1, _WAYS)]
