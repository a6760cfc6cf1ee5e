"""Qwen2 and Qwen2.5: a Llama with a bias on queries, keys and values."""

from hex_llm.kernels.window import Window
from hex_llm.model_fields import Fields
from hex_llm.models.arch import Arch, Kind
from hex_llm.models.read import Kinds, read_arch, read_layer_types

_WINDOW, _FULL_LAYERS = 4096, 28  # where the file has no such field


def read_qwen2(fields: Fields) -> Arch:
    """With the defaults of transformers' Qwen2Config."""
    return read_arch(fields, "Qwen2ForCausalLM", qkv_bias=True, kinds=later_layers_windowed(fields))


def later_layers_windowed(fields: Fields) -> Kinds:
    """The layers from a given one on may have a window."""
    size = None
    # Published files name a window and do not use it.
    if fields.flag("use_sliding_window", False):
        size = fields.integer_unless_null("sliding_window", _WINDOW)
    full = fields.integer("max_window_layers", _FULL_LAYERS, smallest=0) if size else 0

    def kinds(num_layers, rope):
        types = ["sliding_attention" if size and i >= full else "full_attention" for i in range(num_layers)]
        windows = {"full_attention": None, "sliding_attention": size and Window(size)}
        return tuple(Kind(rope, windows[each]) for each in read_layer_types(fields, types))

    return kinds
