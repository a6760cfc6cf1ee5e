"""What stands between two products of a layer, as a kernel that lets the second one start to fetch its weight.

XLA's own fusion does the same sums, but the product behind it cannot start before it has ended.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.chain import padded
from hex_llm.kernels.rms import Rms

THREADS = 128
VECTORS = (4, 2, 1)  # elements that a thread loads at a time: as many as go into its share of a row


def supports(width: int) -> bool:
    """Whether rows of this width can be done."""
    return width % THREADS == 0 and width <= 16384


@functools.partial(jax.jit, static_argnames="rms")
def add_norm(x: Array, pieces: Array, weight: Array, rms: Rms, *, inner: Array | None = None) -> tuple[Array, Array]:
    """As `reference.add_norm`, but the norm has `padded` rows, those past M of zeros."""
    tokens, width = x.shape
    dtype = x.dtype
    vector = next(size for size in VECTORS if width // THREADS % size == 0)

    def body(x_ref, pieces_ref, weight_ref, inner_ref, sum_ref, norm_ref):
        # The kernel behind may come now: it waits for the end of this one before it reads what this one writes.
        plgpu.griddepcontrol_launch_dependents()
        token = lax.axis_index("token")
        layout = plgpu.Layout.WG_STRIDED((width,), vector)

        def load(ref):
            return plgpu.load(ref, layout=layout, optimized=False)

        def normed(row, scale):
            wide = row.astype(jnp.float32)
            factor = lax.rsqrt(jnp.sum(wide * wide) / width + rms.eps)
            scale = scale.astype(jnp.float32)
            if rms.plus_one:
                return (wide * factor * (1 + scale)).astype(dtype)
            return ((wide * factor).astype(dtype).astype(jnp.float32) * scale).astype(dtype)

        scale = load(weight_ref).astype(dtype)
        inner_scale = None if inner_ref is None else load(inner_ref).astype(dtype)
        plgpu.griddepcontrol_wait()

        @pl.when(token < tokens)
        def _token():
            added = load(pieces_ref.at[0, token]).astype(jnp.float32)
            for i in range(1, pieces.shape[0]):
                added = added + load(pieces_ref.at[i, token]).astype(jnp.float32)
            old = load(x_ref.at[token]).astype(jnp.float32)
            added = added.astype(dtype)
            if inner_scale is not None:
                added = normed(added, inner_scale)
            row = (old + added.astype(jnp.float32)).astype(dtype)
            sum_ref[token] = row
            norm_ref[token] = normed(row, scale)

        @pl.when(token >= tokens)
        def _padding():
            norm_ref[token] = plgpu.layout_cast(jnp.zeros_like(scale), layout)

    kernel = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct((padded(tokens), width), dtype)],
        grid=(padded(tokens),),
        grid_names=("token",),
    )
    return tuple(kernel(x, pieces, weight, inner))
