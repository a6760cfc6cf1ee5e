"""SmolLM3: a Llama that does not rotate its heads in every fourth layer."""

from hex_llm.kernels.window import Window
from hex_llm.layers.rope import Rope
from hex_llm.model_fields import Fields
from hex_llm.models.arch import Arch, Kind
from hex_llm.models.read import read_arch, read_layer_types, read_rotated


def read_smollm3(fields: Fields) -> Arch:
    """With the defaults of transformers' SmolLM3Config."""
    bias = fields.flag("attention_bias", False)
    return read_arch(
        fields,
        "SmolLM3ForCausalLM",
        num_kv_heads=4,
        tied=True,
        theta=2e6,
        kinds=lambda num_layers, rope: _kinds(fields, num_layers, rope),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _kinds(fields: Fields, num_layers: int, rope: Rope) -> tuple[Kind, ...]:
    """Layers that rotate see everything, and so do the others, unless the file gives those a window."""
    rotated = read_rotated(fields, num_layers)
    windowed = fields.flag("use_sliding_window", False) and fields.has("sliding_window")
    window = Window(fields.integer("sliding_window")) if windowed else None
    types = ["full_attention" if turned or window is None else "sliding_attention" for turned in rotated]
    return tuple(
        Kind(rope if turned else None, window if each == "sliding_attention" else None)
        for turned, each in zip(rotated, read_layer_types(fields, types), strict=True)
    )
