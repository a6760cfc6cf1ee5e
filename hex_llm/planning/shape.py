"""How large a model is, by its config.json alone: what memory and time are reckoned from.

`models/arch` and the weights that a family declares say it exactly, but with JAX; a test compares the two for every
model of the catalog.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hex_llm.model_fields import Fields

# Models whose windows leave out every so-many-th layer, where the config does not list the layers' types.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "llama4_text": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    embed: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool  # the output head is the embedding
    experts: int
    experts_per_token: int
    shared_expert: bool  # one that all tokens go through, as large as the others
    windows: tuple[int | None, ...]  # of each layer; None: a token sees all before it

    @property
    def dense(self) -> int:
        """Numbers of the weights that every token is multiplied with, but for the head."""
        attention = 2 * self.embed * (self.heads + self.kv_heads) * self.head_dim
        plain = self._expert if self.shared_expert or not self.experts else 0
        return self.layers * (attention + plain + self.experts * self.embed)

    @property
    def routed(self) -> int:
        """Numbers of the experts that a token goes through some of."""
        return self.layers * self.experts * self._expert

    @property
    def head(self) -> int:
        return self.vocab * self.embed

    @property
    def parameters(self) -> int:
        return self.dense + self.routed + self.head * (1 if self.tied else 2)

    @property
    def routed_share(self) -> float:
        return self.experts_per_token / self.experts if self.experts else 0.0

    @property
    def _expert(self) -> int:
        return 3 * self.embed * self.mlp


def read_shape(config: Mapping[str, Any], source: str) -> Shape:
    """`source` names the config in messages."""
    top = Fields(source, config)
    fields = top.section("text_config") or top
    layers, embed = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    experts = fields.integer("num_experts" if fields.has("num_experts") else "num_local_experts", 0, smallest=0)
    kind = fields.text("model_type", "")
    return Shape(
        layers=layers,
        embed=embed,
        mlp=fields.integer("moe_intermediate_size" if fields.has("moe_intermediate_size") else "intermediate_size"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", max(embed // heads, 1)),
        vocab=fields.integer("vocab_size"),
        context=fields.integer("max_position_embeddings"),
        tied=fields.flag("tie_word_embeddings", kind.startswith("gemma")),
        experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok") if experts else 0,
        shared_expert=kind == "llama4_text",
        windows=_windows(fields, kind, layers),
    )


def _windows(fields: Fields, kind: str, layers: int) -> tuple[int | None, ...]:
    name = "attention_chunk_size" if fields.has("attention_chunk_size") else "sliding_window"
    if not fields.has(name) or not fields.flag("use_sliding_window", True):
        return (None,) * layers
    size = fields.integer(name)
    types = fields.texts("layer_types")
    if len(types) == layers:
        return tuple(None if each == "full_attention" else size for each in types)
    every = fields.integer("sliding_window_pattern", _FULL_EVERY.get(kind, layers + 1))
    return tuple(None if (layer + 1) % every == 0 else size for layer in range(layers))
