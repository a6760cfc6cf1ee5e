"""The left operands of a block's products: how the rows of weights lie in the slots of a ring, and how a warpgroup
takes them from there.

Weights of bfloat16 are multiplied from shared memory. Those in few bits lie in the slots as codes and scales, which a
warpgroup takes to its registers, makes bfloat16 of them, and multiplies from there while it decodes the next.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.hopper import MMA_ROWS
from hex_llm.kernels.quant_matmul import gpu_decode
from hex_llm.kernels.quant_matmul.gpu_layout import CHUNK, CHUNKS, LINE, Grouping, chunk_lines, grouping_of
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, Coding, Matrix, Packed, bits

SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


class Place(NamedTuple):
    """Where the rows of a weight that a slot takes begin."""

    expert: Array
    row: Array
    column: Array


class Left(Protocol):
    @property
    def rows(self) -> int:
        """Of each weight in a slot."""
        ...

    @property
    def depth(self) -> int:
        """Columns of a slot."""
        ...

    @property
    def copies(self) -> int:
        """To a slot, for each weight."""
        ...

    @property
    def registers(self) -> tuple[int, int] | None:
        """Of a thread that copies and of one that multiplies; None: what the launch gives to each."""
        ...

    @property
    def slot_bytes(self) -> int: ...

    def scratch(self, slots: int) -> list[Any]:
        """The rings of shared memory."""
        ...

    def copy(self, refs: list[Any], place: Place, rings: list[Any], slot: Array, which: int, barrier: Any) -> None:
        """The rows of the `which`-th weight to their slot."""
        ...

    def multiply(
        self, sums: tuple[Any, ...], rings: list[Any], x_ring: Any, slot: Array, worker: Array, go_on: Callable
    ) -> None:
        """Adds to each weight's sums [64, tokens]; calls `go_on` once all products of the slot before are done, and
        leaves no more under way than those of this slot."""
        ...


def left_of(weight: Matrix, *, weights: int, rows: int, depth: int) -> Left:
    """For so many weights side by side, of so many rows each."""
    if isinstance(weight, Packed):
        grouping = grouping_of(weight)
        assert grouping is not None, "the sums of experts are added, and each has scales of its own"
        return Codes(weights, rows, weight.coding, grouping)
    return Plain(weights, rows, depth, weight.dtype)


def arrays_of(weight: Matrix) -> list[Array]:
    """Those that `Left.copy` takes, as `refs`."""
    return [weight.data, weight.scale] if isinstance(weight, Packed) else [weight]


@dataclass(frozen=True)
class Plain:
    weights: int
    rows: int
    depth: int
    dtype: Any

    copies = 1
    registers = None

    @property
    def slot_bytes(self) -> int:
        return self.weights * self.rows * self.depth * jnp.dtype(self.dtype).itemsize

    def scratch(self, slots: int) -> list[Any]:
        return [plgpu.SMEM((slots, self.weights * self.rows, self.depth), self.dtype, transforms=SWIZZLED)]

    def copy(self, refs: list[Any], place: Place, rings: list[Any], slot: Array, which: int, barrier: Any) -> None:
        source = refs[0].at[place.expert, pl.ds(place.row, self.rows), pl.ds(place.column, self.depth)]
        plgpu.copy_gmem_to_smem(source, rings[0].at[slot, pl.ds(which * self.rows, self.rows)], barrier)

    def multiply(
        self, sums: tuple[Any, ...], rings: list[Any], x_ring: Any, slot: Array, worker: Array, go_on: Callable
    ) -> None:
        for i, each in enumerate(sums):
            rows = pl.ds(i * self.rows + worker * MMA_ROWS, MMA_ROWS)
            plgpu.wgmma(each, rings[0].at[slot, rows], x_ring.at[slot].transpose((1, 0)))
        plgpu.wgmma_wait(self.weights)
        go_on()


# Of a thread that copies and of one that multiplies, by how many warpgroups do: together at most what the launch took,
# or it hangs.
REGISTERS = {2: (40, 232), 3: (32, 160)}


@dataclass(frozen=True)
class Codes:
    """In tiles of 64 rows and 128 columns, as `quant_matmul/gpu_layout.py` says."""

    weights: int
    rows: int
    coding: Coding
    grouping: Grouping

    copies = 2  # codes and scales
    depth = HOPPER_COLUMNS

    @property
    def tiles(self) -> int:
        return self.rows // MMA_ROWS

    @property
    def registers(self) -> tuple[int, int] | None:
        return REGISTERS.get(self.tiles)

    @property
    def slot_bytes(self) -> int:
        return self.weights * self.rows * (HOPPER_COLUMNS * bits(self.coding) // 8 + 4 * self.grouping.words)

    def scratch(self, slots: int) -> list[Any]:
        tiles = self.weights * self.tiles
        return [
            plgpu.SMEM((slots, tiles, CHUNKS * chunk_lines(self.coding), LINE), jnp.int32),
            plgpu.SMEM((slots, tiles, self.grouping.words, MMA_ROWS), jnp.int32),
        ]

    def copy(self, refs: list[Any], place: Place, rings: list[Any], slot: Array, which: int, barrier: Any) -> None:
        rows, column = pl.ds(lax.div(place.row, MMA_ROWS), self.tiles), lax.div(place.column, HOPPER_COLUMNS)
        for ref, ring in zip(refs, rings, strict=True):
            target = ring.at[slot, pl.ds(which * self.tiles, self.tiles)]
            plgpu.copy_gmem_to_smem(ref.at[place.expert, rows, column], target, barrier)

    def multiply(
        self, sums: tuple[Any, ...], rings: list[Any], x_ring: Any, slot: Array, worker: Array, go_on: Callable
    ) -> None:
        products = list(itertools.product(range(CHUNKS), range(self.weights)))
        # All at once: there is one wait for shared memory then, and not one for each product.
        loaded = [self._load(rings, slot, i * self.tiles + worker, chunk) for chunk, i in products]
        for (chunk, i), (codes, scales) in zip(products, loaded, strict=True):
            right = x_ring.at[slot, :, pl.ds(chunk * CHUNK, CHUNK)].transpose((1, 0))
            plgpu.wgmma(sums[i], gpu_decode.decode(codes, scales, self.coding, self.grouping, chunk), right)
            # The registers of the product before are free, and at first all of the slot before.
            plgpu.wgmma_wait(1)
            if (chunk, i) == products[0]:
                go_on()

    def _load(self, rings: list[Any], slot: Array, tile: Array, chunk: int) -> tuple[Array, tuple[Array, ...]]:
        """A chunk's codes, and the scales that they need."""
        codes, scales = rings
        count = chunk_lines(self.coding)
        lines = codes.at[slot, tile, pl.ds(chunk * count, count)]
        words = [scales.at[slot, tile, word] for word in gpu_decode.words_of(self.grouping, chunk)]
        return (
            plgpu.load(lines, layout=gpu_decode.word_layout(self.coding)),
            tuple(plgpu.load(each, layout=gpu_decode.ROW_LAYOUT, optimized=False) for each in words),
        )
