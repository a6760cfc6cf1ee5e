"""Phi-3 and Phi-4: a Llama whose checkpoint has queries, keys and values in one tensor, gate and up in another."""

from hex_llm.model_fields import Fields
from hex_llm.models import llama
from hex_llm.models.arch import Arch
from hex_llm.models.read import read_arch, windowed
from hex_llm.models.weights import Matrix, Part, nested, repeated, weight
from hex_llm.pytree import pytree


@pytree
class Attention(llama.Attention):
    qkv: Matrix = weight(Part("qkv_proj.weight", llama.QKV_ROWS, ("embed",)))


@pytree
class Mlp(llama.Mlp):
    gate_up: Matrix = weight(Part("gate_up_proj.weight", ("mlp", "mlp"), ("embed",)))


@pytree
class Layer(llama.Layer):
    attention: Attention = nested(Attention, "self_attn.")
    mlp: Mlp = nested(Mlp, "mlp.")


@pytree
class Phi3(llama.Llama):
    layers: tuple[Layer, ...] = repeated(Layer, "model.layers.{}.")


def read_phi3(fields: Fields) -> Arch:
    """With the defaults of transformers' Phi3Config."""
    fields = fields.with_defaults({"original_max_position_embeddings": 4096})
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return read_arch(fields, "Phi3ForCausalLM", eps=1e-5, kinds=windowed(window))
