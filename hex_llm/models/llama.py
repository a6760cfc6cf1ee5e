"""Llama 2, 3, 3.1, 3.2, 3.3, Guard 3 and Code Llama: weights and layer, which others share."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention.api import attend_tokens
from hex_llm.kernels.paged_attention.pages import Pages
from hex_llm.kernels.quant_matmul.rows import Tokens
from hex_llm.kernels.rope_write.api import rope_write
from hex_llm.layers.linear import linear_parts, linear_summed, taken_in_8_bits
from hex_llm.layers.mlp import gated_mlp
from hex_llm.layers.norm import Stream, add_rms_norm
from hex_llm.model_fields import Fields
from hex_llm.models.arch import Arch, Kind
from hex_llm.models.read import read_arch
from hex_llm.models.weights import Matrix, Weight, fused, nested, norm, repeated, tensor
from hex_llm.pytree import pytree

QKV_ROWS = ("heads", "kv_heads", "kv_heads")

type Tables = tuple[Array, Array] | None  # cosines and sines; None: no rotation


def _qkv_bias(arch: Arch) -> bool:
    return arch.qkv_bias


def _o_bias(arch: Arch) -> bool:
    return arch.o_bias


def _mlp_bias(arch: Arch) -> bool:
    return arch.mlp_bias


def _head_norm(arch: Arch) -> bool:
    return arch.head_norm


def _untied(arch: Arch) -> bool:
    return not arch.tied


@pytree
class Attention:
    qkv: Matrix = fused(("q_proj.weight", "k_proj.weight", "v_proj.weight"), QKV_ROWS, "embed")
    qkv_bias: Weight | None = fused(("q_proj.bias", "k_proj.bias", "v_proj.bias"), QKV_ROWS, when=_qkv_bias)
    q_norm: Weight | None = norm("q_norm.weight", "head", when=_head_norm)
    k_norm: Weight | None = norm("k_norm.weight", "head", when=_head_norm)
    o: Matrix = tensor("o_proj.weight", "embed heads")
    o_bias: Weight | None = tensor("o_proj.bias", "embed", when=_o_bias)

    sinks = None  # for those whose queries may look at nothing, see gpt_oss


@pytree
class Mlp:
    gate_up: Matrix = fused(("gate_proj.weight", "up_proj.weight"), ("mlp", "mlp"), "embed")
    gate_up_bias: Weight | None = fused(("gate_proj.bias", "up_proj.bias"), ("mlp", "mlp"), when=_mlp_bias)
    down: Matrix = tensor("down_proj.weight", "embed mlp")
    down_bias: Weight | None = tensor("down_proj.bias", "embed", when=_mlp_bias)

    @property
    def first(self) -> Matrix | None:
        """The weight that alone multiplies the tokens as they come; None: others want them, too."""
        return self.gate_up


@pytree
class Layer:
    attention_norm: Weight = norm("input_layernorm.weight")
    attention: Attention = nested(Attention, "self_attn.")
    mlp_norm: Weight = norm("post_attention_layernorm.weight")
    mlp: Any = nested(Mlp, "mlp.")

    after_attention = after_mlp = None  # for those who normalise there as well, see gemma2


@pytree
class Llama:
    embed: Weight = tensor("model.embed_tokens.weight", "vocab embed")
    layers: tuple[Layer, ...] = repeated(Layer, "model.layers.{}.")
    norm: Weight = norm("model.norm.weight")
    head: Matrix | None = tensor("lm_head.weight", "vocab embed", when=_untied)


def attention(
    x: Tokens, pages: Pages, weights: Attention, arch: Arch, kind: Kind, rope: Tables, batch: Batch
) -> tuple[Array, Pages]:
    """[T, D] -> [n, T, D], to be added; the tokens' keys and values are written to the pages."""
    norms = None if weights.q_norm is None or weights.k_norm is None else (weights.q_norm, weights.k_norm)
    qkv = linear_parts(x, weights.qkv)
    options = {"bias": weights.qkv_bias, "norms": norms, "rms": arch.rms, "head_dim": arch.head_dim}
    q, pages = rope_write(qkv, rope, pages, batch, x.dtype, **options)
    tokens = attend_tokens(
        q,
        pages,
        batch,
        scale=arch.query_scale,
        window=kind.window,
        soft_cap=arch.soft_cap,
        sinks=weights.sinks,
        eight_bits=taken_in_8_bits(jax.ShapeDtypeStruct((q.shape[0], q.shape[1] * q.shape[2]), x.dtype), weights.o),
    )
    return linear_summed(tokens, weights.o, weights.o_bias), pages


def dense(x: Tokens, weights: Mlp, arch: Arch, batch: Batch) -> Array:
    """[T or more, D] -> [n, T or more, D], to be added; rows past T mean nothing."""
    return gated_mlp(
        x, weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias, activation=arch.activation
    )


def layer(
    stream: Stream,
    pages: Pages,
    weights: Any,
    arch: Arch,
    kind: Kind,
    rope: Tables,
    batch: Batch,
    *,
    attention: Callable[..., tuple[Array, Pages]] = attention,
    feed_forward: Callable[..., Array] = dense,
) -> tuple[Stream, Pages]:
    """The stream of tokens and the layer's pages, before and after."""
    x, h = add_rms_norm(stream, weights.attention_norm, arch.rms, behind=weights.attention.qkv)
    parts, pages = attention(h, pages, weights.attention, arch, kind, rope, batch)
    stream = Stream(x, parts, weights.after_attention)
    x, h = add_rms_norm(stream, weights.mlp_norm, arch.rms, behind=weights.mlp.first)
    return Stream(x, feed_forward(h, weights.mlp, arch, batch), weights.after_mlp), pages


def read_llama(fields: Fields) -> Arch:
    """With the defaults of transformers' LlamaConfig."""
    bias = fields.flag("attention_bias", False)
    return read_arch(fields, "LlamaForCausalLM", qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias", False))
