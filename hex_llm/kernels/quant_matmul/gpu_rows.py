"""Tokens brought to 8 bits on Hopper: a block for each of them. The product behind it can start to fetch its weight."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.chain import padded
from hex_llm.kernels.quant_matmul.rows import EightBits, Rows

THREADS = 128
VECTORS = (8, 4, 2, 1)  # elements that a thread loads at a time: as many as go into its share of a piece
MAX_PIECE = 16384  # columns that a block has in its registers


def supports(width: int) -> bool:
    """Whether rows of this width can be done."""
    return width > 0 and width % THREADS == 0


def divided(row: Array, scale: Array, how: EightBits) -> Array:
    """In a kernel: a float32 row in 8 bits."""
    return how.rounded(how.within(row * (1 / scale)))


@jax.jit
def quantize(x: Array, how: EightBits) -> Rows:
    """As `reference.quantize_rows`, but the rows are `padded`, those past M of zeros."""
    tokens, width = x.shape
    count = next(n for n in range(1, width) if width % (n * THREADS) == 0 and width // n <= MAX_PIECE)
    piece = width // count
    rows = padded(tokens, how.dtype)
    vector = next(size for size in VECTORS if piece // THREADS % size == 0)
    layout = plgpu.Layout.WG_STRIDED((piece,), vector)

    def body(x_ref, given_ref, values_ref, scale_ref):
        # The kernel behind may come now: it waits for the end of this one before it reads what this one writes.
        plgpu.griddepcontrol_launch_dependents()
        token = lax.axis_index("token")
        pieces = [pl.ds(i * piece, piece) for i in range(count)]
        given = None if given_ref is None else given_ref[0]
        plgpu.griddepcontrol_wait()

        def load(part):
            return plgpu.load(x_ref.at[token, part], layout=layout, optimized=False).astype(jnp.float32)

        @pl.when(token < tokens)
        def _token():
            if count == 1:
                row = load(pieces[0])
                scale = how.own_scale(row) if given is None else given
                values_ref[token] = divided(row, scale, how)
            else:
                # Read twice: registers hold a piece, and another of the largest numbers so far.
                def largest():
                    return functools.reduce(jnp.maximum, [jnp.abs(load(part)) for part in pieces])

                scale = how.own_scale(largest()) if given is None else given
                for part in pieces:
                    values_ref[token, part] = divided(load(part), scale, how)
            scale_ref[token] = scale

        @pl.when(token >= tokens)
        def _padding():
            zeros = plgpu.layout_cast(jnp.zeros((piece,), how.dtype), layout)
            for part in pieces:
                values_ref[token, part] = zeros
            scale_ref[token] = jnp.float32(1)

    kernel = plgpu.kernel(
        body,
        kernel_name="rows_to_8_bits",
        out_type=[
            jax.ShapeDtypeStruct((rows, width), how.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        grid=(rows,),
        grid_names=("token",),
    )
    given = None if how.input_scale is None else how.input_scale.reshape(1)
    values, scale = kernel(x, given)
    return Rows(values, scale, str(x.dtype))
