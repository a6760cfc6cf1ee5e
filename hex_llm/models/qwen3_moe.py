"""Qwen3 with experts: its heads, and Mixtral's way with experts."""

from hex_llm.model_fields import Fields
from hex_llm.models import llama, mixtral
from hex_llm.models.arch import Arch
from hex_llm.models.read import read_arch, windowed
from hex_llm.models.weights import Matrix, fused, nested, repeated
from hex_llm.pytree import pytree

_GATE_UP = ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")


@pytree
class Moe(mixtral.Moe):
    gate_up: Matrix = fused(_GATE_UP, mixtral.GATE_UP_ROWS, "embed", stack="tensors")
    down: Matrix = fused(("experts.{}.down_proj.weight",), ("embed",), "mlp", stack="tensors")


@pytree
class Layer(llama.Layer):
    mlp: Moe = nested(Moe, "mlp.")


@pytree
class Qwen3Moe(llama.Llama):
    layers: tuple[Layer, ...] = repeated(Layer, "model.layers.{}.")


def read_qwen3_moe(fields: Fields) -> Arch:
    """With the defaults of transformers' Qwen3MoeConfig."""
    if (step := fields.integer("decoder_sparse_step", 1)) != 1:
        raise fields.refuse("decoder_sparse_step", f"is {step}; experts are served in every layer only")
    if fields.values.get("mlp_only_layers"):
        raise fields.refuse("mlp_only_layers", "names layers; experts are served in every layer only")
    bias = fields.flag("attention_bias", False)
    windowed_at_all = fields.flag("use_sliding_window", False)
    window = fields.integer_unless_null("sliding_window", 4096) if windowed_at_all else None
    return read_arch(
        fields,
        "Qwen3MoeForCausalLM",
        num_kv_heads=4,
        head_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        kinds=windowed(window),
        mlp_size=fields.integer("moe_intermediate_size", 768),
        renormalised=fields.flag("norm_topk_prob", False),
        **mixtral.read_experts(fields, "num_experts", 128, 8),
    )
