"""Merging the partial attention of a row's chunks, and bringing tokens to the 8 bits in which the next product takes
them: a block for each token, whose scale is that of all its heads. Its warpgroups have some of them each."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels import gpu_parts
from hex_llm.kernels.gpu_warps import WARPS, warp_per_row
from hex_llm.kernels.hopper import LOG2E
from hex_llm.kernels.paged_attention.gpu_decode_merge import FEW_ROWS, merge_into
from hex_llm.kernels.paged_attention.gpu_decode_plan import DecodePlan
from hex_llm.kernels.paged_attention.gpu_decode_sizes import Sizes
from hex_llm.kernels.quant_matmul.gpu_rows import divided, write_scale, write_sums
from hex_llm.kernels.quant_matmul.rows import EightBits, Rows, sums_shape
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS

LOADS = 16  # of neighbours' partial results that a warpgroup has under way
MOST_NUMBERS = 8192  # of a token: they are in registers


def supports(sizes: Sizes) -> bool:
    """Few rows have many chunks, which a block for each of them merges sooner."""
    numbers = sizes.num_kv_heads * sizes.group * sizes.head_dim
    return sizes.rows > FEW_ROWS and sizes.group % WARPS == 0 and sizes.head_dim % 64 == 0 and numbers <= MOST_NUMBERS


def merge_rows(
    averages: Array,
    exponents: Array,
    plan: DecodePlan,
    sizes: Sizes,
    num_seqs: int,
    sinks: Array | None,
    how: EightBits,
) -> Rows:
    """As `merge`, brought to 8 bits: [num_seqs, N * H], of zeros past the sequences. Sums come with heads that are
    tiles."""
    z = sizes
    has_sums = how.with_sums and z.head_dim == HOPPER_COLUMNS
    layout = warp_per_row(WARPS, z.head_dim)  # a head for each warp, of so many neighbours
    # Of each of the neighbours that one has, by its part: which row of the sequence, and the first of its heads.
    warpgroups = gpu_parts.most_parts(lambda n: z.num_kv_heads % n == 0)
    rows_each = z.num_kv_heads // warpgroups
    own_heads = range(0, z.group, WARPS)
    at_once = max(1, LOADS // (rows_each * len(own_heads)))
    shape = WARPS, z.head_dim

    def body(
        averages_ref, exponents_ref, sequences_ref, sinks_ref, given_ref, values_ref, scale_ref, sums_ref, *shared
    ):  # fmt: skip
        # The kernel behind may come now: it waits for the end of this one before it reads what this one writes.
        plgpu.griddepcontrol_launch_dependents()
        parts, part, token = gpu_parts.Parts(warpgroups, *shared), gpu_parts.own_part(), lax.axis_index("token")
        neighbours = [(part * rows_each + i, head) for i in range(rows_each) for head in own_heads]
        sequence = jnp.minimum(token, z.num_seqs - 1)
        chunks = jnp.where(token < z.num_seqs, sequences_ref[sequence, 3], 0)
        given = None if given_ref is None else given_ref[0]

        def of_heads(ref: Any) -> Array:
            return plgpu.load(ref, layout=layout.reduce(1), optimized=False).astype(jnp.float32)

        def every(value: Any) -> Array:
            return plgpu.layout_cast(jnp.full((WARPS,), value, jnp.float32), layout.reduce(1))

        def wide(of_heads: Array) -> Array:
            return lax.broadcast_in_dim(of_heads, shape, [0])

        # A sink is a partial result that was there before: its weight is 1, and its average 0.
        begin = [(every(-jnp.inf), every(0))] * len(neighbours)
        if sinks_ref is not None:
            first = [kv * z.group + head for kv, head in neighbours]
            begin = [(of_heads(sinks_ref.at[pl.ds(each, WARPS)]) * LOG2E, every(1)) for each in first]
        plgpu.griddepcontrol_wait()

        def merge_some(turn: Array, sums: list[tuple[Array, Array, Array]]) -> list[tuple[Array, Array, Array]]:
            start = turn * at_once
            merged = []
            for (kv, head), so_far in zip(neighbours, sums, strict=True):
                row = sequence * z.num_kv_heads + kv
                q_row = z.first_q_row(row) + head
                found = []
                for i in range(at_once):
                    place = jnp.minimum(start + i, chunks - 1)
                    exponent = of_heads(exponents_ref.at[row, place, pl.ds(q_row, WARPS)])
                    is_there = lax.broadcast(start + i < chunks, (WARPS,))
                    heads_ref = averages_ref.at[row, place, pl.ds(head, WARPS)]
                    average = plgpu.load(heads_ref, layout=layout, optimized=False)
                    found.append((jnp.where(is_there, exponent, every(-jnp.inf)), average))
                merged.append(merge_into(*so_far, found, wide))
            return merged

        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        none = [(zero, *each) for each in begin]
        sums = lax.fori_loop(0, lax.div(chunks + (at_once - 1), at_once), merge_some, none)
        # Rounded as tokens are that come as they are.
        heads = [
            (average / wide(jnp.maximum(weight, every(1e-30)))).astype(jnp.bfloat16).astype(jnp.float32)
            for average, _, weight in sums
        ]
        if given is None:
            largest = functools.reduce(jnp.maximum, [how.sizes(each) for each in heads])
            scale = how.scale_of(parts.over_all(jnp.maximum, jnp.max(largest, axis=1)))
        else:
            scale = given
        for (kv, head), each in zip(neighbours, heads, strict=True):
            own = pl.ds(kv * z.group + head, WARPS)
            rounded = divided(each, scale, how)
            values_ref[token, own] = rounded
            if sums_ref is not None:
                write_sums(sums_ref, token, kv * z.group + head, rounded)

        write_scale(scale_ref, sums_ref, token, scale, z.num_kv_heads * z.group)

    kernel = plgpu.kernel(
        body,
        kernel_name="attention_merge",
        out_type=[
            jax.ShapeDtypeStruct((num_seqs, z.num_kv_heads * z.group, z.head_dim), how.dtype),
            jax.ShapeDtypeStruct((num_seqs,), jnp.float32),
            jax.ShapeDtypeStruct(sums_shape(num_seqs, z.num_kv_heads * z.group * z.head_dim), jnp.bfloat16)
            if has_sums
            else None,
        ],
        grid=(num_seqs,),
        grid_names=("token",),
        num_threads=warpgroups,
        thread_name=gpu_parts.NAME,
        scratch_types=gpu_parts.scratch(warpgroups, turns=1),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    given = None if how.input_scale is None else how.input_scale.reshape(1)
    values, scale, added = kernel(averages, exponents, plan.sequences, sinks, given)
    return Rows(values.reshape(num_seqs, -1), scale, "bfloat16", added)
