"""Llama 4 Scout's language model: one expert of many and one that all tokens share; three of four layers see a chunk
of the text and rotate their heads, the fourth sees everything and does not."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.matmul.reference import total
from hex_llm.kernels.paged_attention.api import attend, write_pages
from hex_llm.kernels.paged_attention.pages import Pages
from hex_llm.kernels.quant_matmul.rows import Tokens
from hex_llm.kernels.rms import rms_norm
from hex_llm.kernels.rope_write.reference import rotate, split
from hex_llm.kernels.window import Window
from hex_llm.layers.linear import linear_float32, linear_parts, linear_share, linear_summed, summed
from hex_llm.layers.mlp import gated_hidden
from hex_llm.layers.moe import experts_mlp, join_padding
from hex_llm.layers.rope import Rope
from hex_llm.model_fields import Fields
from hex_llm.models import llama, mixtral
from hex_llm.models.arch import Arch, Kind
from hex_llm.models.read import language_model, read_arch, read_layer_types, read_rotated
from hex_llm.models.weights import Matrix, Part, Weight, nested, repeated, tensor, weight
from hex_llm.pytree import pytree


def _qkv_parts(name: str, columns: tuple[str, ...] = ()) -> tuple[Part, ...]:
    return (
        Part(f"q_proj.{name}", ("heads",), columns, neighbours=True),
        Part(f"k_proj.{name}", ("kv_heads",), columns, neighbours=True),
        Part(f"v_proj.{name}", ("kv_heads",), columns),
    )


@pytree
class Attention(llama.Attention):
    qkv: Matrix = weight(*_qkv_parts("weight", ("embed",)))
    qkv_bias: Weight | None = weight(*_qkv_parts("bias"), when=lambda arch: arch.qkv_bias)


@pytree
class Moe:
    router: Weight = tensor("router.weight", "expert embed")
    gate_up: Matrix = weight(
        Part("experts.gate_up_proj", mixtral.GATE_UP_ROWS, ("embed",), transposed=True),
        stack="joined",
        apart=tuple(Part(f"experts.{{}}.{name}_proj.weight", ("mlp",), ("embed",)) for name in ("gate", "up")),
    )
    down: Matrix = weight(
        Part("experts.down_proj", ("embed",), ("mlp",), transposed=True),
        stack="joined",
        apart=(Part("experts.{}.down_proj.weight", ("embed",), ("mlp",)),),
    )
    shared: llama.Mlp = nested(llama.Mlp, "shared_expert.")

    gate_up_bias = down_bias = None
    first = None  # the router reads the tokens as well


@pytree
class Layer(llama.Layer):
    attention: Attention = nested(Attention, "self_attn.")
    mlp: Moe = nested(Moe, "feed_forward.")


@pytree
class Llama4(llama.Llama):
    layers: tuple[Layer, ...] = repeated(Layer, "model.layers.{}.")


def attention(
    x: Tokens, pages: Pages, weights: Attention, arch: Arch, kind: Kind, rope: llama.Tables, batch: Batch
) -> tuple[Array, Pages]:
    """As in `llama`; heads are normalised after they are rotated, and far away, those that are not grow."""
    q, k, v = split(linear_parts(x, weights.qkv), pages, batch, x.dtype, weights.qkv_bias, arch.head_dim)
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
        if arch.norm_rotated:
            q, k = (rms_norm(each, jnp.ones((), x.dtype), arch.rms) for each in (q, k))
    elif arch.temperature is not None:
        scale, floor = arch.temperature
        growth = 1 + scale * jnp.log1p(jnp.floor((batch.positions + 1).astype(jnp.float32) / floor))
        q = (q * growth[:, None, None]).astype(x.dtype)
    pages = write_pages(pages, k, v, batch)
    out = attend(q, pages, batch, scale=arch.query_scale, window=kind.window)
    return linear_summed(out.reshape(out.shape[0], -1), weights.o, weights.o_bias), pages


def feed_forward(x: Array, weights: Moe, arch: Arch, batch: Batch) -> Array:
    """[T or more, D] -> [1, T, D], to be added."""
    num_tokens = batch.tokens.shape[0]
    logit, chosen = jax.lax.top_k(linear_float32(x, weights.router)[:num_tokens], 1)
    scaled, chosen = x[:num_tokens] * jax.nn.sigmoid(logit).astype(x.dtype), join_padding(chosen, batch.real)
    parts = experts_mlp(scaled, weights, chosen, jnp.ones_like(logit), activation=arch.activation)
    hidden = gated_hidden(x, weights.shared.gate_up, activation=arch.activation)
    shared = linear_share(hidden, weights.shared.down)
    # Added before the devices' shares are, which are then sent once.
    both = total(parts)[:num_tokens].astype(x.dtype) + total(shared)[:num_tokens].astype(x.dtype)
    return summed(both[None], x.dtype)


layer = partial(llama.layer, attention=attention, feed_forward=feed_forward)


def read_llama4(fields: Fields) -> Arch:
    """With the defaults of transformers' Llama4TextConfig."""
    for name in ("interleave_moe_layer_step", "num_experts_per_tok"):
        if (number := fields.integer(name, 1)) != 1:
            raise fields.refuse(name, f"is {number}; this architecture is served with 1 only")
    # The first files, and what was made from them, say 4.
    tuned = fields.values.get("attn_temperature_tuning") == 4 or fields.flag("attn_temperature_tuning", True)
    bias = fields.flag("attention_bias", False)
    return read_arch(
        fields,
        "Llama4ForCausalLM",
        num_kv_heads=8,
        head_dim=128,
        theta=500000.0,
        eps=1e-5,
        kinds=lambda num_layers, rope: _kinds(fields, num_layers, rope),
        norm_rotated=fields.flag("use_qk_norm", True),
        temperature=(fields.number("attn_scale", 0.1), fields.number("floor_scale", 8192)) if tuned else None,
        qkv_bias=bias,
        o_bias=bias,
        **mixtral.read_experts(fields, "num_local_experts", 16, 1),
    )


def read_llama4_multimodal(fields: Fields) -> Arch:
    return replace(read_llama4(language_model(fields)), architecture="Llama4ForConditionalGeneration")


def _kinds(fields: Fields, num_layers: int, rope: Rope) -> tuple[Kind, ...]:
    if fields.has("moe_layers") and fields.values["moe_layers"] != [*range(num_layers)]:
        raise fields.refuse("moe_layers", f"does not name all of the {num_layers} layers; others are not served")
    rotated = read_rotated(fields, num_layers)
    size = fields.integer_unless_null("attention_chunk_size", 8192)
    window = {"full_attention": None, "chunked_attention": size and Window(size, chunked=True)}
    types = ["chunked_attention" if each else "full_attention" for each in rotated]
    return tuple(
        Kind(rope if turned else None, window[each])
        for turned, each in zip(rotated, read_layer_types(fields, types), strict=True)
    )
