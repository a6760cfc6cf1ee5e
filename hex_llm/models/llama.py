"""Llama 2, 3, 3.1, 3.2, 3.3, Guard 3 and Code Llama: weights and layer, which others share."""

from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention.api import attend
from hex_llm.kernels.rope_write.api import rope_write
from hex_llm.layers.linear import linear_parts, linear_summed
from hex_llm.layers.mlp import gated_mlp
from hex_llm.layers.norm import Rms, Stream, add_rms_norm
from hex_llm.models.arch import Arch, read_arch
from hex_llm.models.fields import Fields
from hex_llm.models.weights import Weight, fused, nested, repeated, tensor
from hex_llm.pytree import pytree

_QKV_ROWS = ("heads", "kv_heads", "kv_heads")


def _qkv_bias(arch: Arch) -> bool:
    return arch.qkv_bias


def _o_bias(arch: Arch) -> bool:
    return arch.o_bias


def _mlp_bias(arch: Arch) -> bool:
    return arch.mlp_bias


def _untied(arch: Arch) -> bool:
    return not arch.tied


@pytree
class Attention:
    qkv: Weight = fused(("q_proj.weight", "k_proj.weight", "v_proj.weight"), _QKV_ROWS, "embed")
    qkv_bias: Weight | None = fused(("q_proj.bias", "k_proj.bias", "v_proj.bias"), _QKV_ROWS, when=_qkv_bias)
    o: Weight = tensor("o_proj.weight", "embed heads")
    o_bias: Weight | None = tensor("o_proj.bias", "embed", when=_o_bias)


@pytree
class Mlp:
    gate_up: Weight = fused(("gate_proj.weight", "up_proj.weight"), ("mlp", "mlp"), "embed")
    gate_up_bias: Weight | None = fused(("gate_proj.bias", "up_proj.bias"), ("mlp", "mlp"), when=_mlp_bias)
    down: Weight = tensor("down_proj.weight", "embed mlp")
    down_bias: Weight | None = tensor("down_proj.bias", "embed", when=_mlp_bias)


@pytree
class Layer:
    attention_norm: Weight = tensor("input_layernorm.weight", "embed", dummy=1.0)
    attention: Attention = nested(Attention, "self_attn.")
    mlp_norm: Weight = tensor("post_attention_layernorm.weight", "embed", dummy=1.0)
    mlp: Mlp = nested(Mlp, "mlp.")


@pytree
class Llama:
    embed: Weight = tensor("model.embed_tokens.weight", "vocab embed")
    layers: tuple[Layer, ...] = repeated(Layer, "model.layers.{}.")
    norm: Weight = tensor("model.norm.weight", "embed", dummy=1.0)
    head: Weight | None = tensor("lm_head.weight", "vocab embed", when=_untied)


def layer(
    stream: Stream, pages: Array, weights: Layer, arch: Arch, rope: tuple[Array, Array], batch: Batch
) -> tuple[Stream, Array]:
    """The stream of tokens and the layer's pages, before and after."""
    rms = Rms(arch.norm_eps)
    x, h = add_rms_norm(stream, weights.attention_norm, rms)
    parts, pages = attention(h, pages, weights.attention, arch, rope, batch)
    x, h = add_rms_norm(Stream(x, parts), weights.mlp_norm, rms)
    mlp = weights.mlp
    return Stream(x, gated_mlp(h, mlp.gate_up, mlp.down, mlp.gate_up_bias, mlp.down_bias)), pages


def attention(
    x: Array, pages: Array, weights: Attention, arch: Arch, rope: tuple[Array, Array], batch: Batch
) -> tuple[Array, Array]:
    """[T, D] -> [n, T, D], to be added; the tokens' keys and values are written to the pages."""
    qkv = linear_parts(x, weights.qkv)
    q, pages = rope_write(qkv, rope, pages, batch, x.dtype, bias=weights.qkv_bias)
    out = attend(q, pages, batch, scale=arch.head_dim**-0.5, window=arch.window)
    return linear_summed(out.reshape(out.shape[0], -1), weights.o, weights.o_bias), pages


def read_llama(fields: Fields) -> Arch:
    """With the defaults of transformers' LlamaConfig."""
    bias = fields.flag("attention_bias", False)
    return read_arch(fields, "LlamaForCausalLM", qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias", False))
