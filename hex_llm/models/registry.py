"""The model families, by the name that config.json gives their architecture."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hex_llm.model_fields import Fields
from hex_llm.models import llama, llama4, mixtral
from hex_llm.models.arch import Arch
from hex_llm.models.gemma import read_gemma
from hex_llm.models.gemma2 import Gemma2, read_gemma2
from hex_llm.models.gemma3 import read_gemma3, read_gemma3_multimodal
from hex_llm.models.gpt_oss import GptOss, read_gpt_oss
from hex_llm.models.mistral import read_mistral
from hex_llm.models.phi3 import Phi3, read_phi3
from hex_llm.models.qwen2 import read_qwen2
from hex_llm.models.qwen3 import read_qwen3
from hex_llm.models.qwen3_moe import Qwen3Moe, read_qwen3_moe
from hex_llm.models.smollm3 import read_smollm3


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between models: how config.json is read, which weights there are, and what a layer computes."""

    read_arch: Callable[[Fields], Arch]
    weights: type[Any] = llama.Llama
    layer: Callable[..., Any] = llama.layer
    multimodal: bool = False  # the checkpoint also has a vision tower


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.read_llama),
    "SmolLM3ForCausalLM": Family(read_smollm3),
    "MistralForCausalLM": Family(read_mistral),
    "MixtralForCausalLM": Family(mixtral.read_mixtral, mixtral.Mixtral, mixtral.layer),
    "Qwen2ForCausalLM": Family(read_qwen2),
    "Qwen3ForCausalLM": Family(read_qwen3),
    "Qwen3MoeForCausalLM": Family(read_qwen3_moe, Qwen3Moe, mixtral.layer),
    "GemmaForCausalLM": Family(read_gemma),
    "Gemma2ForCausalLM": Family(read_gemma2, Gemma2),
    "Gemma3ForCausalLM": Family(read_gemma3, Gemma2),
    "Gemma3ForConditionalGeneration": Family(read_gemma3_multimodal, Gemma2, multimodal=True),
    "Phi3ForCausalLM": Family(read_phi3, Phi3),
    "Llama4ForCausalLM": Family(llama4.read_llama4, llama4.Llama4, llama4.layer),
    "Llama4ForConditionalGeneration": Family(
        llama4.read_llama4_multimodal, llama4.Llama4, llama4.layer, multimodal=True
    ),
    "GptOssForCausalLM": Family(read_gpt_oss, GptOss, mixtral.layer),
}


def family(arch: Arch) -> Family:
    return FAMILIES[arch.architecture]
