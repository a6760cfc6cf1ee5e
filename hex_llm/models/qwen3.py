"""Qwen3: a Llama whose heads of queries and keys are normalised."""

from hex_llm.model_fields import Fields
from hex_llm.models.arch import Arch
from hex_llm.models.qwen2 import later_layers_windowed
from hex_llm.models.read import read_arch


def read_qwen3(fields: Fields) -> Arch:
    """With the defaults of transformers' Qwen3Config."""
    bias = fields.flag("attention_bias", False)
    return read_arch(
        fields,
        "Qwen3ForCausalLM",
        num_kv_heads=32,
        head_dim=128,
        head_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        kinds=later_layers_windowed(fields),
    )
