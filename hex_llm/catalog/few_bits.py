"""Models whose checkpoints have their weights in few bits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hex_llm.catalog.entry import Entry, Recommendation
from hex_llm.catalog.llama import LLAMA
from hex_llm.catalog.machines import v5e
from hex_llm.catalog.mistral import MISTRAL
from hex_llm.catalog.qwen import QWEN

_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _NUMBERS | {"strategy": "channel", "dynamic": False},
            "input_activations": _NUMBERS | {"strategy": "token", "dynamic": True},
        }
    },
}


def _kept(name: str, of: str, how: Mapping[str, Any], recommended: tuple[Recommendation, ...], bits: int = 4) -> Entry:
    """A model that is another one, kept in another way."""
    plain = next(entry for entry in (*LLAMA, *MISTRAL, *QWEN) if entry.name == of)
    config = {**plain.config, "quantization_config": dict(how)}
    return replace(plain, name=name, config=config, recommended=recommended, bits=bits)


FEW_BITS = (
    _kept("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "meta-llama/Llama-3.1-8B-Instruct", _AWQ, v5e(1)),
    _kept(
        "hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4",
        "meta-llama/Llama-3.1-70B-Instruct",
        _AWQ,
        v5e(4, memory=0.45),
    ),
    _kept(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic",
        "meta-llama/Llama-3.1-8B-Instruct",
        _FP8,
        v5e(4),
        bits=8,
    ),
    _kept("TheBloke/Mistral-7B-Instruct-v0.2-AWQ", "mistralai/Mistral-7B-Instruct-v0.2", _AWQ, v5e(1)),
    _kept(
        "casperhansen/mixtral-instruct-awq",
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        _AWQ | {"modules_to_not_convert": ["gate"]},
        v5e(4),
    ),
    _kept("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct", _AWQ, v5e(1)),
    _kept("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct", _GPTQ, v5e(1)),
    _kept("Qwen/Qwen2.5-32B-Instruct-AWQ", "Qwen/Qwen2.5-32B-Instruct", _AWQ, v5e(4, length=32768)),
)
