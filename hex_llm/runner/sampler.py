"""Chooses the next token of each row, on the device.

A row's token follows from its logits, its parameters, its seed and its position: not from the rows beside it, its
place among them or the padding, nor from which of the functions here it went through. It is the largest of the logits
with Gumbel noise, which is a draw from their softmax. To need little noise and no sort, the vocabulary is cut into
chunks: noise chooses a chunk by its mass, then more noise a token inside it.

Each function takes logits [S, V] float32 that have been through their processors, and says of each row its token
[S] int32 and whether its logits were of any use [S] bool: no NaN or +inf among them, and not all -inf.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from hex_llm.kernels.reach.api import reach
from hex_llm.kernels.reach.filters import ALL, Filters, beside, depth
from hex_llm.parallel.manual import device_index, is_split, join_over_devices
from hex_llm.pytree import pytree
from hex_llm.runner.threefry import threefry

_CHUNKS = 128
_GREEDY_BELOW = 1e-5  # a temperature under which a draw could only be the likeliest token
_FLAT = 1e4  # a temperature above which all are equally likely, but no longer told apart by top_k


@pytree
class SamplingRows:
    """How each row's token is chosen. Padding rows are cheapest with temperature 0."""

    temperature: Array  # [S] float32: 0 is greedy
    top_p: Array  # [S] float32: 1 is all
    top_k: Array  # [S] int32: 0 or less is all, 1 is greedy whatever the temperature
    min_p: Array  # [S] float32: 0 is all
    seed: Array  # [S] uint32
    position: Array  # [S] int32: of the token being sampled


@dataclass(frozen=True)
class _Chunks:
    """A vocabulary in pieces, and the largest logit of each: +inf where there is a NaN."""

    logits: Array  # [S, V]
    values: Array  # [S, C, L]: the same, and then padding
    peaks: Array  # [S, C]

    @property
    def usable(self) -> Array:
        return jnp.isfinite(jnp.max(self.peaks, axis=-1))


def choose_greedy(logits: Array, rows: SamplingRows) -> tuple[Array, Array]:
    """For rows that are all greedy. Each device may have its own part of the vocabulary: only the likeliest of that
    goes to the others."""
    chunks = _cut(logits)
    tokens, peaks = _likeliest(chunks), jnp.max(chunks.peaks, axis=-1)
    if is_split():
        tokens, peaks = tokens + device_index() * logits.shape[1], peaks[None]
        peaks, tokens = (join_over_devices(x, axis=0) for x in (peaks, tokens[None]))
        best = jnp.argmax(peaks, axis=0)[None]  # of equal ones the first, as in a vocabulary that is whole
        tokens, peaks = (jnp.take_along_axis(x, best, axis=0)[0] for x in (tokens, peaks))
    return tokens, jnp.isfinite(peaks)


def choose_drawn(logits: Array, rows: SamplingRows) -> tuple[Array, Array]:
    """For rows without top_k, top_p and min_p."""
    chunks = _cut(logits)
    return _choose(chunks, rows, _everything), chunks.usable


def choose_filtered(logits: Array, rows: SamplingRows, *, implementation: str | None = None) -> tuple[Array, Array]:
    """For any rows. `implementation` is of the reach."""
    chunks = _cut(logits)
    tokens = _choose(chunks, rows, lambda filters: reach(logits, filters, implementation=implementation))
    return tokens, chunks.usable


def choose_any(logits: Array, rows: SamplingRows) -> tuple[Array, Array]:
    """For any rows, with no more work than they ask for: where the host need not wait to know how much that is."""
    chunks = _cut(logits)

    def search(filters: Filters) -> Array:
        asked = jnp.isfinite(filters.top_k) | jnp.isfinite(filters.top_p) | (filters.min_p > 0)
        return lax.cond(jnp.any(asked), lambda: reach(logits, filters), lambda: _everything(filters))

    tokens = lax.cond(jnp.all(_greedy(rows)), lambda: _likeliest(chunks), lambda: _choose(chunks, rows, search))
    return tokens, chunks.usable


def _greedy(rows: SamplingRows) -> Array:
    return (rows.temperature < _GREEDY_BELOW) | (rows.top_k == 1)


def _everything(filters: Filters) -> Array:
    return jnp.full_like(filters.peak, ALL)


def _choose(chunks: _Chunks, rows: SamplingRows, reach: Callable[[Filters], Array]) -> Array:
    greedy = _greedy(rows)
    filters = Filters(
        peak=jnp.max(chunks.peaks, axis=-1),
        temperature=jnp.where(greedy, jnp.float32(1), jnp.minimum(rows.temperature, _FLAT)),
        top_k=jnp.where(greedy | (rows.top_k <= 0), jnp.inf, rows.top_k.astype(jnp.float32)),
        top_p=jnp.where(greedy | (rows.top_p >= 1), jnp.inf, rows.top_p),
        min_p=jnp.where(greedy, 0.0, rows.min_p),
    )
    return jnp.where(greedy, _likeliest(chunks), _draw(chunks, filters, reach(filters), rows))


def _cut(logits: Array) -> _Chunks:
    rows, vocab = logits.shape
    padding = -vocab % _CHUNKS
    values = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf).reshape(rows, _CHUNKS, -1)
    # XLA's maximum on the CPU can lose a NaN, so that it is not left to the maximum.
    return _Chunks(logits, values, jnp.max(jnp.where(values < jnp.inf, values, jnp.inf), axis=-1))


def _likeliest(chunks: _Chunks) -> Array:
    return _descend(chunks, chunks.peaks, lambda inside: inside)


def _descend(chunks: _Chunks, chunk_scores: Array, scores: Callable[[Array], Array]) -> Array:
    """The first token with the highest score in the first chunk with the highest score."""
    chunk = jnp.argmax(chunk_scores, axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(chunks.values, chunk[:, None, None], axis=1)[:, 0]
    token = chunk * inside.shape[-1] + jnp.argmax(scores(inside), axis=-1).astype(jnp.int32)
    return jnp.minimum(token, chunks.logits.shape[-1] - 1)


def _draw(chunks: _Chunks, filters: Filters, reach: Array, rows: SamplingRows) -> Array:
    """A token within the row's reach, by its probability."""

    def kept(values: Array) -> Array:
        # The logarithm of how likely a token is beside the likeliest. A quotient rounds the same in every fusion.
        below = (values - beside(filters.peak, values)) / beside(filters.temperature, values)
        return jnp.where(depth(values, filters) < beside(reach, values), below, -jnp.inf)

    noise = _gumbel(rows.seed, rows.position, _CHUNKS + chunks.values.shape[-1])
    masses = jnp.sum(jnp.exp(kept(chunks.values)), axis=-1)
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
