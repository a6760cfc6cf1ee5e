"""Mistral 7B, Nemo and Small: a Llama whose tokens may see only so many before them."""

from hex_llm.model_fields import Fields
from hex_llm.models.arch import Arch
from hex_llm.models.read import read_arch, windowed

_WINDOW = 4096  # where the file has no such field


def read_mistral(fields: Fields) -> Arch:
    """With the defaults of transformers' MistralConfig."""
    window = fields.integer_unless_null("sliding_window", _WINDOW)
    return read_arch(fields, "MistralForCausalLM", num_kv_heads=8, kinds=windowed(window))
