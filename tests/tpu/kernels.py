"""Kernels at a model's sizes, as one device of a topology has them, for the TPU compiler."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.grouped_matmul import tpu as grouped_matmul
from hex_llm.kernels.paged_attention import tpu
from hex_llm.kernels.quant_matmul import api as quant_matmul
from hex_llm.kernels.quant_matmul import layouts
from hex_llm.kernels.quant_matmul import tpu as quant_tpu
from hex_llm.kernels.quant_matmul.weight import Codes, Coding, Packed
from hex_llm.kernels.window import Window
from hex_llm.parallel.backend import compiling_for


def attention(
    devices: list,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    page_size: int = 32,
    page_bytes: int = 1 << 30,
    tokens: int,
    seqs: int = 256,
    max_model_len: int = 131072,
    decode: bool = False,
    dtype: str = "bfloat16",
    pages_dtype: str | None = None,
    window: list[Any] | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> jax.stages.Lowered:
    """A step's keys and values written, and its queries answered. `page_bytes`: of all pages."""
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("model",)), PartitionSpec())
    # Where heads are narrower than a tile the compiler would lay pages out otherwise, and copy them all in every layer.
    in_order = Format(Layout(major_to_minor=(0, 1, 2, 3, 4)), sharding)
    number, kept = jnp.dtype(dtype), jnp.dtype(pages_dtype or dtype)

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32, sharding: Any = sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    batch = Batch(
        tokens=array((tokens,)),
        positions=array((tokens,)),
        write_page=array((tokens,)),
        write_offset=array((tokens,)),
        cu_q=None if decode else array((seqs + 1,)),
        kv_len=array((seqs,)),
        page_table=array((seqs, max_model_len // page_size)),
        num_decode=array(()),
        num_seqs=array(()),
    )
    options = {"scale": head_dim**-0.5, "window": window and Window(*window), "soft_cap": soft_cap}

    def run(q, k, v, pages, batch, sinks):
        batch = dataclasses.replace(batch, plans=tpu.plans(batch, q, pages, [options["window"]]))
        pages = tpu.write_pages(pages, k, v, batch)
        return tpu.attend(q, pages, batch, sinks=sinks, **options), pages

    shape = (2, kv_heads, page_size, head_dim)
    pages = array((page_bytes // math.prod(shape) // kept.itemsize, *shape), kept, in_order)
    q, kv = array((tokens, heads, head_dim), number), array((tokens, kv_heads, head_dim), number)
    traced = jax.jit(run, donate_argnums=3, out_shardings=(sharding, in_order)).trace(
        q, kv, kv, pages, batch, array((heads,), number) if sinks else None
    )
    return traced.lower(lowering_platforms=("tpu",))


def experts(devices: list, *, tokens: int, num_experts: int, k: int, embed: int, mlp: int) -> jax.stages.Lowered:
    """The experts of a layer, of which each is cut down to `mlp` rows by tensor parallelism."""
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("model",)), PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    x, gate_up, down = array(tokens, embed), array(num_experts, 2 * mlp, embed), array(num_experts, embed, mlp)
    assert grouped_matmul.supports(x, gate_up, down)
    run = partial(grouped_matmul.experts, activation="silu")
    chosen, share = array(tokens, k, dtype=jnp.int32), array(tokens, k, dtype=jnp.float32)
    return jax.jit(run).trace(x, gate_up, None, down, chosen, share).lower(lowering_platforms=("tpu",))


def quantized(
    devices: list,
    *,
    tokens: int,
    out: int,
    size: int,
    coding: Coding,
    group: int | None = None,
    zero: bool = False,
    num_experts: int | None = None,
) -> jax.stages.Lowered:
    """A product with a weight in few bits that is packed already, or with one for each block of tokens."""
    mesh = Mesh(np.array(devices[:1]), ("model",))

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    rows = (out,) if num_experts is None else (num_experts, out)
    numbers: dict[Coding, Any] = {"int8": jnp.int8, "w8a8": jnp.int8, "fp8": jnp.float8_e4m3fn}
    codes = Codes(
        codes=array(*rows, size, dtype=numbers.get(coding, jnp.uint8)),
        scale=array(*rows, size // group if group else 1),
        zero=array(*rows, size // group) if group and zero else None,
        order=None,
        input_scale=None,
        coding=coding,
    )

    def run(x: jax.Array, weight: Packed) -> jax.Array:
        if num_experts is None:
            return quant_matmul.matmul(x, weight, dtype=jnp.dtype(jnp.bfloat16))
        sizes = quant_tpu.sizes_for(tokens // num_experts, weight)
        expert, blocks = jnp.arange(num_experts, dtype=jnp.int32), jnp.full(1, num_experts, jnp.int32)
        return quant_tpu.product(x, weight, expert, blocks, sizes, dtype=jnp.dtype(jnp.float32))

    with compiling_for("tpu"):
        packed = jax.eval_shape(layouts.pack, codes)
        assert packed.layout == "tpu"
        packed = jax.tree.map(lambda each: array(*each.shape, dtype=each.dtype), packed)
        # As in a model: it says what the kernel is compiled for.
        whole = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        return jax.jit(whole).trace(array(tokens, size, dtype=jnp.bfloat16), packed).lower(lowering_platforms=("tpu",))
