"""What all decoders share: embed, layers, and the head."""

from typing import Any, Protocol

import jax
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention.api import prepare
from hex_llm.layers.linear import linear_float32
from hex_llm.layers.norm import Rms, Stream, rms_norm, value
from hex_llm.layers.rope import rope_tables
from hex_llm.models.arch import Arch
from hex_llm.models.registry import family


class Model(Protocol):
    """The weights of a decoder, whichever its family."""

    @property
    def embed(self) -> Array: ...
    @property
    def layers(self) -> tuple[Any, ...]: ...
    @property
    def norm(self) -> Array: ...
    @property
    def head(self) -> Array | None: ...


def forward(model: Model, arch: Arch, kv: tuple[Array, ...], batch: Batch) -> tuple[Array, tuple[Array, ...]]:
    """The hidden state [T, D] of every token, and the pages with their keys and values.

    `kv` holds for each layer an array [pages, 2, kv_heads, page_size, head_dim].
    """
    layer = jax.jit(family(arch).layer, static_argnames="arch")
    x, rope = model.embed[batch.tokens], rope_tables(arch.rope, batch.positions)
    q = jax.ShapeDtypeStruct((x.shape[0], arch.num_heads, arch.head_dim), x.dtype)
    batch = prepare(batch, q, kv[0], {arch.window})
    # All of this is there before the first layer begins (`kernels.chain` says why), and is not computed again in every
    # layer, where XLA would fuse it into its users.
    x, rope, batch = jax.lax.optimization_barrier((x, rope, batch))
    stream, written = Stream(x), []
    for pages, weights in zip(kv, model.layers, strict=True):
        stream, pages = layer(stream, pages, weights, arch=arch, rope=rope, batch=batch)
        written.append(pages)
    return value(stream, Rms(arch.norm_eps)), tuple(written)


def logits(model: Model, arch: Arch, hidden: Array) -> Array:
    """[R, D] hidden states of the tokens to sample after -> [R, V] float32."""
    x = rms_norm(hidden, model.norm, Rms(arch.norm_eps))
    return linear_float32(x, model.embed if model.head is None else model.head)
