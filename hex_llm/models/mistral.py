"""Mistral 7B: a Llama whose tokens may see only so many before them."""

from hex_llm.models.arch import Arch, read_arch
from hex_llm.models.fields import Fields

_WINDOW = 4096  # where the file has no such field; null says that there is none


def read_mistral(fields: Fields) -> Arch:
    """With the defaults of transformers' MistralConfig."""
    window = None
    if fields.has("sliding_window") or "sliding_window" not in fields.values:
        window = fields.integer("sliding_window", _WINDOW)
    return read_arch(fields, "MistralForCausalLM", num_kv_heads=8, window=window)
