"""What all decoders share: embed, layers, and the head."""

from typing import Any, Protocol

import jax
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention.api import prepare
from hex_llm.kernels.paged_attention.pages import Pages
from hex_llm.kernels.rms import rms_norm
from hex_llm.layers.embedding import embed, score, whole, without_filling
from hex_llm.layers.norm import Stream, value
from hex_llm.layers.rope import rope_tables
from hex_llm.models.arch import Arch
from hex_llm.models.registry import family
from hex_llm.models.weights import Matrix


class Model(Protocol):
    """The weights of a decoder, whichever its family."""

    @property
    def embed(self) -> Array: ...
    @property
    def layers(self) -> tuple[Any, ...]: ...
    @property
    def norm(self) -> Array: ...
    @property
    def head(self) -> Matrix | None: ...


def forward(model: Model, arch: Arch, kv: tuple[Pages, ...], batch: Batch) -> tuple[Array, tuple[Pages, ...]]:
    """The hidden state [T, D] of every token, and the pages with their keys and values.

    `kv` holds the pages of each layer: [pages, 2, kv_heads, page_size, head_dim].
    """
    layer = jax.jit(family(arch).layer, static_argnames=("arch", "kind"))
    x = embed(model.embed, batch.tokens, arch.embed_scale)
    tables = [rope_tables(rope, batch.positions, batch.long) for rope in arch.ropes]
    # Counted from the arrays at hand: a shard of the model holds a part of the heads.
    num_heads = model.layers[0].attention.o.shape[1] // arch.head_dim
    q = jax.ShapeDtypeStruct((x.shape[0], num_heads, arch.head_dim), x.dtype)
    batch = prepare(batch, q, kv[0], arch.windows)
    # All of this is there before the first layer begins (`kernels.chain` says why), and is not computed again in every
    # layer, where XLA would fuse it into its users.
    x, tables, batch = jax.lax.optimization_barrier((x, tables, batch))
    table_of = dict(zip(arch.ropes, tables, strict=True)) | {None: None}
    stream, written = Stream(x), []
    for kind, pages, weights in zip(arch.kinds, kv, model.layers, strict=True):
        stream, pages = layer(stream, pages, weights, arch=arch, kind=kind, rope=table_of[kind.rope], batch=batch)
        written.append(pages)
    return value(stream, arch.rms), tuple(written)


def logits(model: Model, arch: Arch, hidden: Array) -> Array:
    """[R, D] hidden states of the tokens to sample after -> [R, V] float32."""
    return whole(own_logits(model, arch, hidden), arch.vocab_size)


def own_logits(model: Model, arch: Arch, hidden: Array) -> Array:
    """The same, but only this device's part of the vocabulary, where devices share it."""
    x = rms_norm(hidden, model.norm, arch.rms)
    head = model.embed if model.head is None else model.head
    return without_filling(score(x, head, arch.logit_soft_cap), arch.vocab_size)
