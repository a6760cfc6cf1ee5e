"""Merging the partial attention of a row's chunks, in order: the second, small kernel of decode attention."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.hopper import LOG2E
from hex_llm.kernels.paged_attention.gpu_decode_plan import DecodePlan
from hex_llm.kernels.paged_attention.gpu_decode_sizes import Sizes

FEW_ROWS = 64
LOADS = 16  # of partial results that a CTA has under way


def merge(
    averages: Array, exponents: Array, plan: DecodePlan, sizes: Sizes, num_seqs: int, sinks: Array | None = None
) -> Array:
    """Merges the chunks of each row, in order: [rows, G, H], with zeros up to the rows of `num_seqs` sequences."""
    z = sizes
    rows = num_seqs * z.num_kv_heads
    # Few rows have many chunks: a CTA for each head loads all of them together. Many rows have few.
    heads = 1 if z.rows <= FEW_ROWS else next(n for n in (4, 3, 2, 1) if z.group % n == 0)
    at_once = LOADS // heads
    layout = plgpu.Layout.WG_STRIDED((z.head_dim,), 1)
    if z.head_dim % 128:  # fewer numbers than threads: each thread has a copy of many
        heads, at_once, layout = 1, 4, plgpu.Layout.WGMMA.reduce(0)

    def body(averages_ref: Any, exponents_ref: Any, sequences_ref: Any, sinks_ref: Any, out_ref: Any) -> None:
        # The kernel behind may come now: it waits for the end of this one before it reads what this one writes.
        plgpu.griddepcontrol_launch_dependents()
        row, first_head = lax.axis_index("row"), lax.axis_index("heads") * heads
        sequence = lax.div(row, z.num_kv_heads)
        chunks = sequences_ref[jnp.minimum(sequence, z.num_seqs - 1), 3]
        chunks = jnp.where(sequence < z.num_seqs, chunks, 0)
        # A sink is a partial result that was there before: its weight is 1, and its average 0.
        first_sink = lax.rem(row, z.num_kv_heads) * z.group + first_head
        begin = [(jnp.float32(-jnp.inf), jnp.float32(0))] * heads
        if sinks_ref is not None:
            begin = [(sinks_ref[first_sink + i].astype(jnp.float32) * LOG2E, jnp.float32(1)) for i in range(heads)]
        plgpu.griddepcontrol_wait()
        first_q_row = z.first_q_row(jnp.minimum(row, z.rows - 1)) + first_head

        def merge_some(turn: Array, sums: list[tuple[Array, Array, Array]]) -> list[tuple[Array, Array, Array]]:
            start = turn * at_once
            places = [jnp.minimum(start + i, chunks - 1) for i in range(at_once)]
            loaded = [
                [
                    (
                        jnp.where(start + i < chunks, exponents_ref[row, place, first_q_row + head], -jnp.inf),
                        plgpu.load(averages_ref.at[row, place, first_head + head], layout=layout, optimized=False),
                    )
                    for i, place in enumerate(places)
                ]
                for head in range(heads)
            ]
            return [merge_into(*sums_of_head, parts) for sums_of_head, parts in zip(sums, loaded, strict=True)]

        zero = plgpu.layout_cast(jnp.zeros((z.head_dim,), jnp.float32), layout)
        none = [(zero, *each) for each in begin]
        sums = lax.fori_loop(0, lax.div(chunks + (at_once - 1), at_once), merge_some, none)
        for head, (average, _, weight) in enumerate(sums):
            out_ref[row, first_head + head] = (average / jnp.maximum(weight, 1e-30)).astype(out_ref.dtype)

    return plgpu.kernel(
        body,
        kernel_name="attention_merge",
        out_type=jax.ShapeDtypeStruct((rows, z.group, z.head_dim), jnp.bfloat16),
        grid=(rows, z.group // heads),
        grid_names=("row", "heads"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(averages, exponents, plan.sequences, sinks)


def merge_into(
    average: Array,
    largest: Array,
    weight: Array,
    parts: list[tuple[Array, Array]],
    wide: Callable[[Array], Array] = lambda each: each,
) -> tuple[Array, Array, Array]:
    """A running average with some more partial ones, each with its exponent, added. Where the exponents are several,
    `wide` spreads what goes with each over its numbers."""
    new_largest = functools.reduce(jnp.maximum, [exponent for exponent, _ in parts], largest)
    decay = jnp.exp2(largest - new_largest)
    average, weight = average * wide(decay), weight * decay
    for exponent, part in parts:
        share = jnp.exp2(exponent - new_largest)
        average, weight = average + part * wide(share), weight + share
    return average, new_largest, weight
