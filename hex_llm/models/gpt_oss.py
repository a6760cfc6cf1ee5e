"""gpt-oss: experts with biases and a clamped gate, and heads that may look at nothing instead of at a token."""

from hex_llm.model_fields import Fields
from hex_llm.models import llama, mixtral
from hex_llm.models.arch import Arch
from hex_llm.models.gemma2 import every_other
from hex_llm.models.read import read_arch
from hex_llm.models.rope_fields import read_rope
from hex_llm.models.weights import Matrix, Part, Weight, nested, repeated, tensor, weight
from hex_llm.pytree import pytree

_THETA = 150000.0
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


@pytree
class Attention(llama.Attention):
    sinks: Weight = tensor("sinks", "sinks")


@pytree
class Moe(mixtral.Moe):
    router: Weight = tensor("router.weight", "expert embed")
    router_bias: Weight = tensor("router.bias", "expert")
    gate_up: Matrix = weight(
        Part("experts.gate_up_proj", mixtral.GATE_UP_ROWS, ("embed",), transposed=True, alternating=True),
        stack="joined",
    )
    gate_up_bias: Weight = weight(
        Part("experts.gate_up_proj_bias", mixtral.GATE_UP_ROWS, alternating=True), stack="joined"
    )
    down: Matrix = weight(Part("experts.down_proj", ("embed",), ("mlp",), transposed=True), stack="joined")
    down_bias: Weight = weight(Part("experts.down_proj_bias", ("embed",)), stack="joined")


@pytree
class Layer(llama.Layer):
    attention: Attention = nested(Attention, "self_attn.")
    mlp: Moe = nested(Moe, "mlp.")


@pytree
class GptOss(llama.Llama):
    layers: tuple[Layer, ...] = repeated(Layer, "model.layers.{}.")


def read_gpt_oss(fields: Fields) -> Arch:
    """With the defaults of transformers' GptOssConfig."""
    bias = fields.flag("attention_bias", True)
    if fields.has("swiglu_limit") and (limit := fields.number("swiglu_limit")) != 7:
        raise fields.refuse("swiglu_limit", f"is {limit:g}; this architecture is served with 7 only")
    if not fields.has("rope_scaling"):
        fields = fields.with_defaults({"rope_parameters": _YARN})
    head_dim = fields.integer("head_dim", 64)
    return read_arch(
        fields,
        "GptOssForCausalLM",
        num_kv_heads=8,
        head_dim=head_dim,
        eps=1e-5,
        rope=read_rope(fields, head_dim, theta=_THETA),
        kinds=every_other(fields, period=2, window=128),
        activation="clamped_silu",
        qkv_bias=bias,
        o_bias=bias,
        **mixtral.read_experts(fields, "num_local_experts", 128, 4),
    )
