"""Gemma and CodeGemma: a Llama with a scaled embedding, norms by 1 + weight, and gelu."""

import math
from typing import Any

from hex_llm.model_fields import Fields
from hex_llm.models.arch import Arch
from hex_llm.models.read import read_arch

# The first is meant whatever the file says: the others are what early files called it.
_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "gelu_tanh")


def read_gemma(fields: Fields) -> Arch:
    """With the defaults of transformers' GemmaConfig."""
    return read_gemma_like(fields, "GemmaForCausalLM", num_kv_heads=16)


def read_gemma_like(fields: Fields, architecture: str, **differences: Any) -> Arch:
    """What all Gemmas share."""
    if fields.has("use_bidirectional_attention") and fields.flag("use_bidirectional_attention", False):
        raise fields.refuse("use_bidirectional_attention", "is true; only decoders are served")
    bias = fields.flag("attention_bias", False)
    return read_arch(
        fields,
        architecture,
        head_dim=256,
        tied=True,
        activations=_ACTIVATIONS,
        activation="gelu",
        plus_one=True,
        embed_scale=math.sqrt(fields.integer("hidden_size")),
        qkv_bias=bias,
        o_bias=bias,
        **differences,
    )
