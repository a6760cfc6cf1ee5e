"""Gemma 2: norms behind attention and mlp too, soft caps, and a window in every other layer."""

from hex_llm.kernels.window import Window
from hex_llm.layers.rope import Rope
from hex_llm.model_fields import Fields
from hex_llm.models import llama
from hex_llm.models.arch import Arch, Kind
from hex_llm.models.gemma import read_gemma_like
from hex_llm.models.read import Kinds, read_layer_types
from hex_llm.models.weights import Weight, norm, repeated
from hex_llm.pytree import pytree


@pytree
class Layer(llama.Layer):
    after_attention: Weight = norm("post_attention_layernorm.weight")
    mlp_norm: Weight = norm("pre_feedforward_layernorm.weight")
    after_mlp: Weight = norm("post_feedforward_layernorm.weight")


@pytree
class Gemma2(llama.Llama):
    layers: tuple[Layer, ...] = repeated(Layer, "model.layers.{}.")


def read_gemma2(fields: Fields) -> Arch:
    """With the defaults of transformers' Gemma2Config."""
    return read_gemma_like(
        fields,
        "Gemma2ForCausalLM",
        num_kv_heads=4,
        kinds=every_other(fields, period=2, window=4096),
        query_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=fields.number_unless_null("attn_logit_softcapping", 50.0),
        logit_soft_cap=fields.number_unless_null("final_logit_softcapping", 30.0),
    )


def every_other(fields: Fields, *, period: int, window: int, local: Rope | None = None) -> Kinds:
    """Of `period` layers the last sees everything, the others through a window, with a rope of their own if given."""
    size = fields.integer_unless_null("sliding_window", window)

    def kinds(num_layers, rope):
        types = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]
        kind = {
            "full_attention": Kind(rope),
            "sliding_attention": Kind(local or rope, Window(size) if size is not None else None),
        }
        return tuple(kind[each] for each in read_layer_types(fields, types))

    return kinds
