"""What stands between two products of a layer, as a kernel that lets the second one start to fetch its weight.

XLA's own fusion does the same sums, but the product behind it cannot start before it has ended. For one that takes its
tokens in 8 bits, they are brought to those here: it would be a kernel of its own.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels import gpu_parts
from hex_llm.kernels.chain import padded
from hex_llm.kernels.quant_matmul.gpu_rows import divided, held, parts_for, write_scale, write_sums
from hex_llm.kernels.quant_matmul.rows import EightBits, Rows, sums_shape
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS
from hex_llm.kernels.rms import Rms

THREADS = 128
VECTORS = (4, 2, 1)  # elements that a thread loads at a time: as many as go into its share of a row


def supports(width: int) -> bool:
    """Whether rows of this width can be done."""
    return width % THREADS == 0 and width <= 16384


@functools.partial(jax.jit, static_argnames="rms")
def add_norm(
    x: Array, pieces: Array, weight: Array, rms: Rms, *, inner: Array | None = None, eight_bits: EightBits | None = None
) -> tuple[Array, Array | Rows]:
    """As `reference.add_norm`, but the norm has `padded` rows, those past M of zeros. With `eight_bits` it
    is in those."""
    tokens, width = x.shape
    dtype = x.dtype
    norm_dtype = dtype if eight_bits is None else eight_bits.dtype
    rows = padded(tokens, norm_dtype)
    warpgroups = parts_for(width)
    line = held(width // warpgroups, eight_bits, VECTORS)
    of_sum, of_inner, of_scale = range(3)  # turns of the parts

    def body(x_ref, pieces_ref, weight_ref, inner_ref, given_ref, sum_ref, norm_ref, scale_ref, sums_ref, *shared):
        # The kernel behind may come now: it waits for the end of this one before it reads what this one writes.
        plgpu.griddepcontrol_launch_dependents()
        parts, part, token = gpu_parts.Parts(warpgroups, *shared), gpu_parts.own_part(), lax.axis_index("token")

        def load(ref):
            return plgpu.load(ref.at[part], layout=line.layout, optimized=False)

        def normed(row, scale, turn):
            wide = row.astype(jnp.float32)
            squares = parts.over_all(jnp.add, line.of_warps(jnp.add, jnp.sum, wide * wide), turn)
            factor = lax.rsqrt(squares / width + rms.eps)
            scale = scale.astype(jnp.float32)
            if rms.plus_one:
                return (wide * factor * (1 + scale)).astype(dtype)
            return ((wide * factor).astype(dtype).astype(jnp.float32) * scale).astype(dtype)

        scale = load(weight_ref).astype(dtype)
        inner_scale = None if inner_ref is None else load(inner_ref).astype(dtype)
        given = None if given_ref is None else given_ref[0]
        plgpu.griddepcontrol_wait()

        def write(norm):
            norm_ref[token, part] = norm
            if sums_ref is not None:
                write_sums(sums_ref, token, part * line.shape[0], norm)

        @pl.when(token < tokens)
        def _token():
            added = load(pieces_ref.at[0, token]).astype(jnp.float32)
            for i in range(1, pieces.shape[0]):
                added = added + load(pieces_ref.at[i, token]).astype(jnp.float32)
            old = load(x_ref.at[token]).astype(jnp.float32)
            added = added.astype(dtype)
            if inner_scale is not None:
                added = normed(added, inner_scale, of_inner)
            row = (old + added.astype(jnp.float32)).astype(dtype)
            sum_ref[token, part] = row
            norm = normed(row, scale, of_sum)
            if eight_bits is not None:
                norm = norm.astype(jnp.float32)
                divisor = line.scale(norm, eight_bits, parts, of_scale) if given is None else given
                norm = divided(norm, divisor, eight_bits)
                write_scale(scale_ref, sums_ref, token, divisor, width // HOPPER_COLUMNS)
            write(norm)

        @pl.when(token >= tokens)
        def _padding():
            write(plgpu.layout_cast(jnp.zeros(line.shape, norm_dtype), line.layout))
            if eight_bits is not None:
                write_scale(scale_ref, sums_ref, token, jnp.float32(1), width // HOPPER_COLUMNS)

    kernel = plgpu.kernel(
        body,
        kernel_name="add_norm",
        out_type=[
            jax.ShapeDtypeStruct((tokens, warpgroups, *line.shape), dtype),
            jax.ShapeDtypeStruct((rows, warpgroups, *line.shape), norm_dtype),
            None if eight_bits is None else jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct(sums_shape(rows, width), jnp.bfloat16) if line.has_sums else None,
        ],
        grid=(rows,),
        grid_names=("token",),
        num_threads=warpgroups,
        thread_name=gpu_parts.NAME,
        scratch_types=gpu_parts.scratch(warpgroups, turns=3),
    )
    given = None if eight_bits is None or eight_bits.input_scale is None else eight_bits.input_scale.reshape(1)

    def lying(array):
        """As threads hold its rows."""
        return None if array is None else array.reshape(*array.shape[:-1], warpgroups, *line.shape)

    y, norm, scales, sums = kernel(lying(x), lying(pieces), lying(weight), lying(inner), given)
    y, norm = y.reshape(x.shape), norm.reshape(rows, width)
    return y, norm if eight_bits is None else Rows(norm, scales, str(dtype), sums)
