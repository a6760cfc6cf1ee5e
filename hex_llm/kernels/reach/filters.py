"""What the reach is about: each row's filters, and how deep below its likeliest token a token lies."""

import jax.numpy as jnp
from jax import Array

from hex_llm.pytree import pytree

GRAIN = 2.0**-19  # nats; float32 logits of 16 and more are no finer
ALL = 2.0**24  # grains, which is 32 nats: a token deeper than that (1e-14 as likely) is beyond the reach of the noise


@pytree
class Filters:
    """What each row leaves over, with values that leave all where it has no such filter."""

    peak: Array  # [S] float32: the largest logit
    temperature: Array  # [S] float32: positive
    top_k: Array  # [S] float32: how many tokens, inf is all
    top_p: Array  # [S] float32: how much of their mass, inf is all
    min_p: Array  # [S] float32: how much of the likeliest token's probability, 0 is all


def depth(values: Array, filters: Filters) -> Array:
    """How far logits [S, ...] lie below their row's largest, in grains, with fractions."""
    # A difference and a product round the same in every fusion.
    return (beside(filters.peak, values) - values) * beside(grains_per_logit(filters), values)


def grains_per_logit(filters: Filters) -> Array:
    return 1 / (filters.temperature * GRAIN)


def beside(per_row: Array, values: Array) -> Array:
    return jnp.expand_dims(per_row, tuple(range(1, values.ndim)))


def reach_of_min_p(filters: Filters) -> Array:
    return jnp.minimum(jnp.floor(-jnp.log(filters.min_p) / GRAIN) + 1, ALL)
