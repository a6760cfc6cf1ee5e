"""Sums that one block of a kernel on Hopper hands over to another, through global memory, while both run.

That they are there is told by a word: a number that is 0, and 1 from when the sums are left until they are taken. All
words are 0 when a kernel begins, and when it ends again; so one array of zeros, made once in a program, serves all of
its kernels, which is what XLA makes of those that each asks for (`words`). To XLA, no kernel changes them, so nothing
but what they compute keeps two of them from running side by side, as they must not: products of a layer follow from
each other.

A block may wait for blocks before it only, which have begun when it does: then somebody always goes on.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from hex_llm.kernels.quant_matmul.weight import HOPPER_ROWS

THREADS = 128  # of a warpgroup
VECTOR = 4  # sums that a thread writes at once
AT_ONCE = 16  # vectors that a thread has under way: with more it would run out of registers


def words(count: int) -> Array:
    return jnp.zeros((count,), jnp.int32)


def leave(place: Any, word: Any, sums: list[Any]) -> None:
    """By a warpgroup: `sums`, each [64, N] float32 as a product leaves them, go to `place` [n, 64, N], in an order of
    their own, in which neighbours write side by side."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), [plgpu.Layout.WGMMA] * len(sums)))
    def inlined(_: Any, place: Any, word: Any, sums: Any) -> None:
        for address, (first, second) in zip(_addresses(place), _pairs(sums), strict=True):
            llvm.store(vector.shuffle(first, second, [0, 1, 2, 3]), address, alignment=16)
        _run("fence.acq_rel.gpu;")
        mgpu.utils.warpgroup_barrier()
        _run_once("st.release.gpu.global.b32 [$0], 1;", word)

    inlined(place, word, sums)  # pyright: ignore[reportCallIssue]


def add(place: Any, word: Any, sums: list[Any]) -> list[Any]:
    """By a warpgroup: `sums` and what another has left at `place`, once it is there."""
    shape = (HOPPER_ROWS, sums[0].shape[1])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), [plgpu.Layout.WGMMA] * len(sums)),
        return_type=[plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)] * len(sums),
    )
    def inlined(_: Any, place: Any, word: Any, sums: Any) -> Any:
        loop = "ld.acquire.gpu.global.b32 a, [$0]; setp.eq.b32 p, a, 0; @p bra again;"
        _run("{ .reg .b32 a; .reg .pred p; again: " + loop + " }", mgpu.utils.memref_ptr(word))
        mgpu.utils.warpgroup_barrier()  # all have seen it
        _run_once("st.relaxed.gpu.global.b32 [$0], 0;", word)
        four = ir.VectorType.get((VECTOR,), ir.F32Type.get())
        found = []
        for i, (address, pair) in enumerate(zip(_addresses(place), _pairs(sums), strict=True)):
            if i and i % AT_ONCE == 0:
                mgpu.utils.warp_barrier()  # no load comes ahead of it
            loaded = llvm.load(four, address, alignment=16)
            halves = (vector.shuffle(loaded, loaded, [i, i + 1]) for i in (0, 2))
            found.extend(arith.addf(old, new) for old, new in zip(pair, halves, strict=True))
        size = len(found) // len(sums)
        return [_like(each, found[i * size : (i + 1) * size]) for i, each in enumerate(sums)]

    return inlined(place, word, sums)  # pyright: ignore[reportCallIssue]


def _pairs(sums: list[Any]) -> list[tuple[Any, Any]]:
    """Of the registers of all, which have two numbers each, those that a thread writes together."""
    registers = [register for each in sums for register in each.registers.flat]
    return list(zip(registers[0::2], registers[1::2], strict=True))


def _like(sums: Any, registers: list[Any]) -> Any:
    array = np.empty(sums.registers.shape, dtype=object)
    array.flat[:] = registers
    return mgpu.FragmentedArray(_registers=array, _layout=sums.layout, _is_signed=sums.is_signed)


def _addresses(place: Any) -> list[Any]:
    """Where a thread writes, vector after vector."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    base, float32 = mgpu.utils.memref_ptr(place), ir.F32Type.get()
    thread = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(THREADS, i32))
    count = int(np.prod(ir.MemRefType(place.type).shape)) // (THREADS * VECTOR)
    first = arith.muli(arith.extui(i64, thread), mgpu.utils.c(VECTOR, i64))

    def address(i: int) -> Any:
        offset = arith.addi(first, mgpu.utils.c(i * THREADS * VECTOR, i64))
        return llvm.getelementptr(base.type, base, [offset], [-(2**31)], float32, llvm.GEPNoWrapFlags.none)

    return [address(i) for i in range(count)]


def _run_once(text: str, word: Any) -> None:
    """By one thread of the warpgroup."""
    with mgpu.utils.when(mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)):
        _run(text, mgpu.utils.memref_ptr(word))


def _run(text: str, *operands: Any) -> None:
    constraints = ",".join(["l"] * len(operands) + ["~{memory}"])
    llvm.inline_asm(ir.Type.parse("!llvm.void"), list(operands), text, constraints, has_side_effects=True)
