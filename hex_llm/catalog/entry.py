"""What is known of a model without its files."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A machine for a model, as Google Cloud names it, and the settings there, as `Config` names them."""

    machine: str
    flags: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    name: str  # on the Hugging Face Hub
    parameters: int  # as published, tied ones once; of a model that also sees, those of its language model
    config: Mapping[str, Any]
    recommended: tuple[Recommendation, ...]
    bits: int = 16  # of most of its weights

    @property
    def weight_bytes(self) -> float:
        """Of all weights, were they all of those bits."""
        return self.parameters * self.bits / 8

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of the config that is about the language model."""
        return self.config.get("text_config", self.config)

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return self.text["max_position_embeddings"]


def config_of(entry: Entry) -> dict[str, Any]:
    """The model's config.json, as far as it decides what is computed: nothing of tokens, training or versions."""
    return copy.deepcopy(dict(entry.config))


def entries(
    *names: str, parameters: int, config: Mapping[str, Any], recommended: tuple[Recommendation, ...]
) -> tuple[Entry, ...]:
    """Models that differ in nothing but their weights' values."""
    return tuple(Entry(name, parameters, config, recommended) for name in names)


def sizes(
    *, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int | None = None
) -> dict[str, int]:
    """The fields of a config that say how large a decoder is; `head_dim` where `hidden` does not give it."""
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads if head_dim is None else head_dim,
    }
