"""Tokens brought to 8 bits on Hopper: a block for each of them, whose warpgroups have a part each if they are few. The
product behind it can start to fetch its weight."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels import gpu_parts
from hex_llm.kernels.chain import MAX_TOKENS, padded
from hex_llm.kernels.gpu_warps import WARPS, warp_per_row
from hex_llm.kernels.quant_matmul.rows import EightBits, Rows, sums_shape, two_parts
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS

THREADS = 128
VECTORS = (8, 4, 2, 1)  # elements that a thread loads at a time: as many as go into its share of a piece
MAX_PIECE = 16384  # columns that a warpgroup has in its registers


def supports(width: int) -> bool:
    """Whether rows of this width can be done."""
    return width > 0 and width % THREADS == 0


@dataclass(frozen=True)
class Held:
    """How the threads of a warpgroup hold a row, or a piece of one: each warp has lines of it, one after the other."""

    shape: tuple[int, int]  # WARPS lines; or, for sums, a line for each of the tiles that they are of
    layout: Any
    has_sums: bool = False

    def of_warps(self, join: Callable[[Array, Array], Array], reduce: Callable[..., Array], row: Array) -> Array:
        """[WARPS]: of what each warp has."""
        lines = [row[i : i + WARPS] for i in range(0, self.shape[0], WARPS)]
        return reduce(functools.reduce(join, lines), axis=1)

    def scale(self, row: Array, how: EightBits, parts: gpu_parts.Parts, turn: int = 0) -> Array:
        """As `how.own_scale`, of a row that the parts have together."""
        largest = self.of_warps(jnp.maximum, jnp.max, how.sizes(row))
        return how.scale_of(parts.over_all(jnp.maximum, largest, turn))


def held(width: int, how: EightBits | None, vectors: tuple[int, ...]) -> Held:
    """With sums where they are wanted, and warps have as many tiles each."""
    if how is not None and how.with_sums and width % (WARPS * HOPPER_COLUMNS) == 0:
        return Held((width // HOPPER_COLUMNS, HOPPER_COLUMNS), warp_per_row(WARPS, HOPPER_COLUMNS), has_sums=True)
    return Held((WARPS, width // WARPS), warp_per_row(WARPS, width // WARPS, vectors))


def parts_for(width: int) -> int:
    """How many warpgroups share a row: with at least 8 numbers for each thread, and whole tiles for each warp."""
    return gpu_parts.most_parts(lambda n: width % (n * WARPS * HOPPER_COLUMNS) == 0 and width >= n * 8 * THREADS)


def divided(row: Array, scale: Array, how: EightBits) -> Array:
    """In a kernel: a float32 row in 8 bits."""
    return how.rounded(how.within(row * (1 / scale)))


def write_sums(sums_ref: Any, token: Array, first: Any, row: Array) -> None:
    """In a kernel: those of [tiles, 128] float8_e4m3fn, of which the first has that place."""
    added = jnp.sum(row.astype(jnp.float16).astype(jnp.float32), axis=1)
    for i, part in enumerate(two_parts(added)):
        sums_ref.at[i, token, pl.ds(first, row.shape[0])][...] = part


def write_scale(scale_ref: Any, sums_ref: Any, token: Array, scale: Array, tiles: int) -> None:
    """In a kernel: one of the parts writes the scale, and zeros past the sums of so many tiles."""

    @pl.when(gpu_parts.own_part() == 0)
    def _() -> None:
        scale_ref[token] = scale
        if sums_ref is not None:
            for i, place in itertools.product(range(2), range(tiles, sums_ref.shape[2])):
                sums_ref[i, token, place] = jnp.bfloat16(0)


@functools.partial(jax.jit, static_argnames="rows")
def quantize(x: Array, how: EightBits, rows: int | None = None) -> Rows:
    """As `reference.quantize_rows`, but so many rows, or `padded`: those past M are of zeros."""
    tokens, width = x.shape
    warpgroups = parts_for(width) if tokens <= MAX_TOKENS else 1
    whole = width // warpgroups
    pieces = next(n for n in range(1, whole) if whole % (n * THREADS) == 0 and whole // n <= MAX_PIECE)
    rows = rows or padded(tokens, how.dtype)
    piece = held(whole // pieces, how, VECTORS)

    def body(x_ref, given_ref, values_ref, scale_ref, sums_ref, *shared):
        # The kernel behind may come now: it waits for the end of this one before it reads what this one writes.
        plgpu.griddepcontrol_launch_dependents()
        parts, part, token = gpu_parts.Parts(warpgroups, *shared), gpu_parts.own_part(), lax.axis_index("token")
        own = [part * pieces + i for i in range(pieces)]
        given = None if given_ref is None else given_ref[0]
        plgpu.griddepcontrol_wait()

        def load(i):
            return plgpu.load(x_ref.at[token, i], layout=piece.layout, optimized=False).astype(jnp.float32)

        def write(i, row):
            values_ref[token, i] = row
            if sums_ref is not None:
                write_sums(sums_ref, token, i * piece.shape[0], row)

        @pl.when(token < tokens)
        def _token():
            if pieces == 1:
                row = load(own[0])
                scale = piece.scale(row, how, parts) if given is None else given
                write(own[0], divided(row, scale, how))
            else:
                # Read twice: registers hold a piece, and another of the largest numbers so far.
                def largest():
                    return functools.reduce(jnp.maximum, [jnp.abs(load(i)) for i in own])

                scale = piece.scale(largest(), how, parts) if given is None else given
                for i in own:
                    write(i, divided(load(i), scale, how))
            write_scale(scale_ref, sums_ref, token, scale, width // HOPPER_COLUMNS)

        @pl.when(token >= tokens)
        def _padding():
            zeros = plgpu.layout_cast(jnp.zeros(piece.shape, how.dtype), piece.layout)
            for i in own:
                write(i, zeros)
            write_scale(scale_ref, sums_ref, token, jnp.float32(1), width // HOPPER_COLUMNS)

    count = warpgroups * pieces
    kernel = plgpu.kernel(
        body,
        kernel_name="rows_to_8_bits",
        out_type=[
            jax.ShapeDtypeStruct((rows, count, *piece.shape), how.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            jax.ShapeDtypeStruct(sums_shape(rows, width), jnp.bfloat16) if piece.has_sums else None,
        ],
        grid=(rows,),
        grid_names=("token",),
        num_threads=warpgroups,
        thread_name=gpu_parts.NAME,
        scratch_types=gpu_parts.scratch(warpgroups, turns=1),
    )
    given = None if how.input_scale is None else how.input_scale.reshape(1)
    values, scale, sums = kernel(x.reshape(tokens, count, *piece.shape), given)
    return Rows(values.reshape(rows, width), scale, str(x.dtype), sums)
