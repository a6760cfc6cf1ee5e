"""Chooses the next token of each row, on the device.

A row's token follows from its logits, its parameters, its seed and its position: not from the rows beside it, its
place among them or the padding. It is the largest of the logits with Gumbel noise, which is a draw from their
softmax. To need little noise and no sort, the vocabulary is cut into chunks: noise chooses a chunk by its mass, then
more noise a token inside it. Which tokens top_k, top_p and min_p leave over is one number per row, a lower limit on
the logit, found by bisection; so equal logits stay or go together.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.pytree import pytree
from hex_llm.runner.threefry import threefry

_CHUNKS = 128
_GREEDY_BELOW = 1e-5  # a temperature under which a draw could only be the likeliest token
_DEPTH = -64.0  # a token this far below the likeliest (1e-28 as likely) is beyond the reach of the noise
_HALVINGS = 32  # of that range: two probabilities any closer are equal in float32


@pytree
class SamplingRows:
    """How each row's token is chosen. Padding rows are cheapest with temperature 0."""

    temperature: Array  # [S] float32: 0 is greedy
    top_p: Array  # [S] float32: 1 is all
    top_k: Array  # [S] int32: 0 or less is all, 1 is greedy whatever the temperature
    min_p: Array  # [S] float32: 0 is all
    seed: Array  # [S] uint32
    position: Array  # [S] int32: of the token being sampled


def sample(logits: Array, rows: SamplingRows) -> Array:
    """The next token of each row, [S] int32, from logits [S, V] float32 that have been through their processors.

    A batch in which every row is greedy costs an argmax, one without top_k, top_p and min_p one more pass.
    """
    chunks = _chunked(logits)
    peaks = jnp.max(chunks, axis=-1)
    likeliest = _descend(chunks, peaks, lambda inside: inside)
    greedy = (rows.temperature < _GREEDY_BELOW) | (rows.top_k == 1)

    def draw() -> Array:
        peak = jnp.max(peaks, axis=-1)
        temperature = jnp.where(greedy, jnp.float32(1), rows.temperature)
        limit = _limit(logits, peak, temperature, rows, ~greedy)
        return jnp.where(greedy, likeliest, _draw(chunks, peak, temperature, limit, rows))

    tokens = lax.cond(jnp.all(greedy), lambda: likeliest, draw)
    return jnp.minimum(tokens, logits.shape[-1] - 1)


def _chunked(logits: Array) -> Array:
    rows, vocab = logits.shape
    padding = -vocab % _CHUNKS
    return jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(rows, _CHUNKS, -1)


def _descend(chunks: Array, chunk_scores: Array, scores: Callable[[Array], Array]) -> Array:
    """The first token with the highest score in the first chunk with the highest score."""
    chunk = jnp.argmax(chunk_scores, axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]
    return chunk * inside.shape[-1] + jnp.argmax(scores(inside), axis=-1).astype(jnp.int32)


def _draw(chunks: Array, peak: Array, temperature: Array, limit: Array, rows: SamplingRows) -> Array:
    """A token at or above the row's limit, by its probability."""

    def kept(values: Array) -> Array:
        below = _below_peak(values, peak, temperature)
        return jnp.where(below >= _beside(limit, values), below, -jnp.inf)

    noise = _gumbel(rows.seed, rows.position, _CHUNKS + chunks.shape[-1])
    masses = jnp.sum(jnp.exp(kept(chunks)), axis=-1)
    return _descend(chunks, jnp.log(masses) + noise[:, :_CHUNKS], lambda inside: kept(inside) + noise[:, _CHUNKS:])


def _gumbel(seed: Array, position: Array, size: int) -> Array:
    """Standard Gumbel noise for each row, [S, size], from its seed and position alone."""

    place = jnp.arange(size, dtype=jnp.uint32)[None, :]
    shape = (seed.shape[0], size)
    key = [jnp.broadcast_to(word[:, None], shape) for word in (seed, position.astype(jnp.uint32))]
    bits, _ = threefry((key[0], key[1]), (jnp.broadcast_to(place, shape), jnp.zeros(shape, jnp.uint32)))
    # Small numbers keep all 32 bits: they make the large noise by which unlikely tokens win.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _beside(per_row: Array, values: Array) -> Array:
    return jnp.expand_dims(per_row, tuple(range(1, values.ndim)))


def _below_peak(values: Array, peak: Array, temperature: Array) -> Array:
    """Logits over temperature, less the row's largest. A difference and a quotient round the same in every fusion."""
    return (values - _beside(peak, values)) / _beside(temperature, values)


def _limit(logits: Array, peak: Array, temperature: Array, rows: SamplingRows, drawn: Array) -> Array:
    """What a token must reach to stay, on the scale of `_below_peak`: `_DEPTH` where all stay."""
    by_min_p = drawn & (rows.min_p > 0)
    by_top_k = drawn & (rows.top_k > 0)
    by_top_p = drawn & (rows.top_p < 1)

    def search() -> Array:
        below = _below_peak(logits, peak, temperature)
        count = jnp.where(by_top_k, rows.top_k.astype(jnp.float32), jnp.inf)

        peaks = _total(below, jnp.ones_like(below), jnp.zeros_like(peak))[1]

        def stage(number: Array, limit: Array) -> Array:
            """First top_k, by tokens that count 1 each, then top_p, by what is left of their mass."""
            by_count = number == 0
            weights = jnp.where(by_count, jnp.ones_like(below), jnp.exp(below))

            def target(total: Array) -> Array:
                return jnp.where(by_count, count, jnp.where(by_top_p, rows.top_p * total, jnp.inf))

            return _raise_limit(below, weights, peaks, target, limit)

        return lax.fori_loop(0, 2, stage, jnp.maximum(jnp.log(rows.min_p), _DEPTH))

    return lax.cond(jnp.any(by_min_p | by_top_k | by_top_p), search, lambda: jnp.full_like(peak, _DEPTH))


@pytree
class _Bisection:
    """Where the limit lies: at or above `low`, below `high`, unless that is where it began."""

    step: Array  # [] int32
    low: Array  # [S]
    high: Array  # [S]
    target: Array  # [S]: what the weights at or above the limit must add up to
    total_low: Array  # [S]: the weights at or above `low`
    count_low: Array  # [S]: the tokens at or above `low`
    count_high: Array  # [S]


def _raise_limit(values: Array, weights: Array, peaks: Array, target: Callable[[Array], Array], limit: Array) -> Array:
    """The highest limit above which the weights still add up to `target`, which is told their sum above `limit`;
    `limit` where they do not even there. `peaks` says how many values are 0, the highest; they weigh 1 each.
    """

    def unsettled(state: _Bisection) -> Array:
        # Not when the target is met to the point or cannot be met, nor with one token left between low and high.
        return (state.total_low > state.target) & (state.count_low - state.count_high > 1)

    def halve(state: _Bisection) -> _Bisection:
        # The first turn looks at `low` itself, so that there is one place that adds up: each is a kernel to compile.
        first = state.step == 0
        middle = jnp.where(first, state.low, (state.low + state.high) / 2)
        total, count = _total(values, weights, middle)
        wanted = jnp.where(first, target(total), state.target)
        rise = first | (unsettled(state) & (total >= wanted))
        fall = ~first & unsettled(state) & (total < wanted)
        enough = first & (peaks >= wanted)  # the likeliest token alone
        return _Bisection(
            step=state.step + 1,
            low=jnp.where(enough, state.high, jnp.where(rise, middle, state.low)),
            high=jnp.where(fall, middle, state.high),
            target=wanted,
            total_low=jnp.where(rise, total, state.total_low),
            count_low=jnp.where(enough, peaks, jnp.where(rise, count, state.count_low)),
            count_high=jnp.where(fall, count, state.count_high),
        )

    endless = jnp.full_like(limit, jnp.inf)
    start = _Bisection(
        step=jnp.int32(0),
        low=limit,
        high=jnp.zeros_like(limit),
        target=-endless,
        total_low=endless,
        count_low=endless,
        count_high=peaks,
    )
    return lax.while_loop(lambda state: (state.step <= _HALVINGS) & jnp.any(unsettled(state)), halve, start).low


def _total(values: Array, weights: Array, limit: Array) -> tuple[Array, Array]:
    """Of the values at or above each row's limit: the sum of their weights, and how many they are."""
    kept = values >= limit[:, None]
    return jnp.sum(jnp.where(kept, weights, 0.0), axis=-1), jnp.sum(jnp.where(kept, 1.0, 0.0), axis=-1)
