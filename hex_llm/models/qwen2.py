"""Qwen2 and Qwen2.5: a Llama with a bias on queries, keys and values."""

from dataclasses import replace

from hex_llm.models.arch import Arch, read_arch
from hex_llm.models.fields import Fields

_WINDOW, _FULL_LAYERS = 4096, 28  # where the file has no such field


def read_qwen2(fields: Fields) -> Arch:
    """With the defaults of transformers' Qwen2Config."""
    arch = read_arch(fields, "Qwen2ForCausalLM", qkv_bias=True)
    window = None
    # Published files name a window and do not use it.
    if fields.flag("use_sliding_window", False):
        window = fields.integer_unless_null("sliding_window", _WINDOW)
    full = fields.integer("max_window_layers", _FULL_LAYERS, smallest=0) if window else arch.num_layers
    if 0 < full < arch.num_layers:
        raise fields.refuse("max_window_layers", f"is {full}, and a window in some layers only is not served yet")
    kind = "full_attention" if full else "sliding_attention"
    if fields.has("layer_types") and fields.values["layer_types"] != [kind] * arch.num_layers:
        raise fields.refuse("layer_types", f"is not {kind!r} for each of the {arch.num_layers} layers")
    return arch if full else replace(arch, window=window)
