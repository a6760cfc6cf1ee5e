"""The model families, by the name that config.json gives their architecture."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hex_llm.models.arch import Arch
from hex_llm.models.fields import Fields
from hex_llm.models.llama import Llama, layer, read_llama
from hex_llm.models.mistral import read_mistral
from hex_llm.models.qwen2 import read_qwen2


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between models: how config.json is read, which weights there are, and what a layer computes."""

    read_arch: Callable[[Fields], Arch]
    weights: type[Any]
    layer: Callable[..., Any]


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(read_llama, Llama, layer),
    "MistralForCausalLM": Family(read_mistral, Llama, layer),
    "Qwen2ForCausalLM": Family(read_qwen2, Llama, layer),
}


def family(arch: Arch) -> Family:
    return FAMILIES[arch.architecture]
