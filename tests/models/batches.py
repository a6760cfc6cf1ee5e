"""Batches made by hand, and a model run on them: what the runner does, said plainly."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from hex_llm.kernels.batch import Batch
from hex_llm.models import decoder
from hex_llm.models.arch import Arch
from hex_llm.models.split import Split
from hex_llm.parallel.mesh import make_mesh
from hex_llm.parallel.sharding import PAGES


def empty_pages(
    arch: Arch, *, num_pages: int, page_size: int, dtype=jnp.float32, num_devices: int = 1
) -> tuple[Array, ...]:
    """They lie as a step leaves them, so that the first step is no program of its own."""
    shape = (num_pages, 2, Split(arch, num_devices).kv_heads * num_devices, page_size, arch.head_dim)
    spread = NamedSharding(make_mesh(num_devices), PAGES)
    return tuple(jax.device_put(np.zeros(shape, dtype), spread) for _ in range(arch.num_layers))


def make_batch(
    slices: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    *,
    page_size: int,
    num_tokens: int,
    width: int | None = None,
    num_seqs: int | None = None,
    long: bool | None = None,
) -> Batch:
    """Each slice is (tokens, position of the first, the pages of its sequence); those of one token come first.

    The batch is padded to `num_tokens`, and with `width` its page tables to so many pages, with `num_seqs` it has that
    many rows: batches of equal sizes share a compiled program. `long` says that its sequences are to be rotated as
    long ones.
    """
    width = width or max(len(pages) for _, _, pages in slices)
    tokens, positions, write_page, write_offset, cu_q, kv_len = [], [], [], [], [0], []
    for own, start, pages in slices:
        for position, token in enumerate(own, start=start):
            tokens.append(token)
            positions.append(position)
            write_page.append(pages[position // page_size])
            write_offset.append(position % page_size)
        cu_q.append(len(tokens))
        kv_len.append(start + len(own))
    table = [[*pages, *[0] * (width - len(pages))] for _, _, pages in slices]
    rows = (num_seqs or len(slices)) - len(slices)
    cu_q, kv_len, table = cu_q + [cu_q[-1]] * rows, kv_len + [0] * rows, table + [[0] * width] * rows
    num_decode = next((i for i, (own, _, _) in enumerate(slices) if len(own) > 1), len(slices))
    padded = (
        np.pad(np.array(x, np.int32), (0, num_tokens - len(x))) for x in (tokens, positions, write_page, write_offset)
    )
    return Batch(
        *(jnp.asarray(x) for x in padded),
        *(jnp.asarray(np.array(x, np.int32)) for x in (cu_q, kv_len, table, num_decode, len(slices))),
        long=None if long is None else jnp.full(num_tokens, long),
    )


def run(model, kv, batch, *, arch, mesh=None):
    """The logits of every token of the batch, and the pages after it; on a mesh, by all of its devices."""
    spread = None if mesh is None else tuple(leaf.sharding.spec for leaf in jax.tree.leaves(model))
    return _run(model, kv, batch, arch=arch, mesh=mesh, spread=spread)


# What the code of a model means is tested here, not how well it is compiled, which takes three times as long.
@partial(jax.jit, static_argnames=("arch", "mesh", "spread"), compiler_options={"xla_backend_optimization_level": 0})
def _run(model, kv, batch, *, arch, mesh, spread):
    def step(model, kv, batch):
        hidden, kv = decoder.forward(model, arch, kv, batch)
        return decoder.logits(model, arch, hidden), kv

    if mesh is None:
        return step(model, kv, batch)
    pages = (PAGES,) * arch.num_layers
    specs = (jax.tree.unflatten(jax.tree.structure(model), spread), pages, PartitionSpec())
    return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(PartitionSpec(), pages), check_vma=False)(
        model, kv, batch
    )
