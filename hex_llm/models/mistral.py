"""Mistral 7B: a Llama whose tokens may see only so many before them."""

from hex_llm.models.arch import Arch, read_arch
from hex_llm.models.fields import Fields

_WINDOW = 4096  # where the file has no such field


def read_mistral(fields: Fields) -> Arch:
    """With the defaults of transformers' MistralConfig."""
    window = fields.integer_unless_null("sliding_window", _WINDOW)
    return read_arch(fields, "MistralForCausalLM", num_kv_heads=8, window=window)
