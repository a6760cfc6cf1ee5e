"""Gemma 3's language model: a Gemma 2 without soft caps, whose heads are normalised, and whose layers with a window,
five of six, have a rope of their own."""

from hex_llm.layers.rope import Rope
from hex_llm.model_fields import Fields
from hex_llm.models.arch import Arch
from hex_llm.models.gemma import read_gemma_like
from hex_llm.models.gemma2 import every_other
from hex_llm.models.read import language_model
from hex_llm.models.rope_fields import read_rope, read_scaled_rope

_GLOBAL, _LOCAL = 1e6, 1e4  # theta, where the file has no such field
# Files of models with a vision tower leave out what they share with the first of them.
_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
}


def read_gemma3(fields: Fields) -> Arch:
    """With the defaults of transformers' Gemma3TextConfig."""
    return _read(fields, "Gemma3ForCausalLM")


def read_gemma3_multimodal(fields: Fields) -> Arch:
    return _read(language_model(fields), "Gemma3ForConditionalGeneration")


def _read(fields: Fields, architecture: str) -> Arch:
    fields = fields.with_defaults(_DEFAULTS)
    everywhere, local = _ropes(fields, fields.integer("head_dim", 256))
    period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    return read_gemma_like(
        fields,
        architecture,
        num_kv_heads=4,
        head_norm=True,
        rope=everywhere,
        kinds=every_other(fields, period=period, window=4096, local=local),
        query_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=fields.number_unless_null("attn_logit_softcapping", None),
        logit_soft_cap=fields.number_unless_null("final_logit_softcapping", None),
    )


def _ropes(fields: Fields, head_dim: int) -> tuple[Rope, Rope]:
    """Of the layers that see everything, and of the others."""
    local = fields.number("rope_local_base_freq", _LOCAL)
    named = fields.section("rope_parameters")
    if named is None:
        return read_rope(fields, head_dim, theta=_GLOBAL), Rope(head_dim, local)
    if fields.has("rope_scaling"):
        raise fields.refuse("rope_scaling", "is there beside rope_parameters, and one of them has to do")
    thetas = {"full_attention": fields.number("rope_theta", _GLOBAL), "sliding_attention": local}
    if unknown := sorted(named.values.keys() - thetas.keys()):
        raise named.refuse(unknown[0], f"is not one of {' and '.join(thetas)}, which have a rope each")
    sections = {kind: named.section(kind) for kind in thetas}
    everywhere, local = (
        read_scaled_rope(fields, section, head_dim, thetas[kind]) if section else Rope(head_dim, thetas[kind])
        for kind, section in sections.items()
    )
    return everywhere, local
