"""Attention at a model's sizes, as one device of a topology has it, for the TPU compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention import tpu, tpu_sizes, tpu_write
from hex_llm.kernels.window import Window


def attend(
    devices: list,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    page_size: int = 32,
    num_pages: int = 2000,
    tokens: int,
    seqs: int = 256,
    max_model_len: int = 131072,
    kind: str,
    dtype: str = "bfloat16",
    window: list[Any] | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> jax.stages.Lowered:
    """kind: "decode", "prefill" or "mixed"."""
    mesh = Mesh(np.array(devices[:1]), ("model",))
    sharding = NamedSharding(mesh, PartitionSpec())

    # Where heads are narrower than a tile the compiler would lay pages out otherwise, and copy them all in every layer.
    in_order = Format(Layout(major_to_minor=(0, 1, 2, 3, 4)), sharding)

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32, sharding: Any = sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    batch = Batch(
        tokens=array((tokens,)),
        positions=array((tokens,)),
        write_page=array((tokens,)),
        write_offset=array((tokens,)),
        cu_q=None if kind == "decode" else array((seqs + 1,)),
        kv_len=array((seqs,)),
        page_table=array((seqs, max_model_len // page_size)),
        num_decode=None if kind == "prefill" else array(()),
        num_seqs=array(()),
    )
    options = {"scale": head_dim**-0.5, "window": window and Window(*window), "soft_cap": soft_cap}

    def run(q, pages, batch, sinks):
        return tpu.attend(q, pages, batch, sinks=sinks, **options)

    args = (
        array((tokens, heads, head_dim), jnp.dtype(dtype)),
        array((num_pages, 2, kv_heads, page_size, head_dim), jnp.dtype(dtype), in_order),
        batch,
        array((heads,), jnp.dtype(dtype)) if sinks else None,
    )
    return jax.jit(run).trace(*args).lower(lowering_platforms=("tpu",))


def write(
    devices: list,
    *,
    kv_heads: int,
    head_dim: int = 128,
    page_size: int = 32,
    num_pages: int = 2000,
    tokens: int,
    seqs: int = 256,
    kind: str,
    dtype: str = "bfloat16",
) -> jax.stages.Lowered:
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("model",)), PartitionSpec())
    in_order = Format(Layout(major_to_minor=(0, 1, 2, 3, 4)), sharding)

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32, sharding: Any = sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(pages, k, v, page, offset, cu_q, count):
        slab = tpu_sizes.slab_rows(page_size, cu_q is None)
        return tpu_write.write_pages(pages, k, v, page, offset, tpu_write.plan_runs(cu_q, offset, slab), count, slab)

    pages = array((num_pages, 2, kv_heads, page_size, head_dim), jnp.dtype(dtype), in_order)
    new = array((tokens, kv_heads, head_dim), jnp.dtype(dtype))
    places = array((tokens,))
    cu_q = None if kind == "decode" else array((seqs + 1,))
    traced = jax.jit(run, donate_argnums=0, out_shardings=in_order).trace(
        pages, new, new, places, places, cu_q, array(())
    )
    return traced.lower(lowering_platforms=("tpu",))
