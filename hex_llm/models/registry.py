"""The model families, by the name that config.json gives their architecture."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hex_llm.models import llama
from hex_llm.models.arch import Arch
from hex_llm.models.fields import Fields


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between models: how config.json is read, which weights there are, and what a layer computes."""

    read_arch: Callable[[Fields], Arch]
    weights: type[Any]
    layer: Callable[..., Any]


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.read_arch, llama.Llama, llama.layer),
}


def family(arch: Arch) -> Family:
    return FAMILIES[arch.architecture]
