"""Mistral 7B, Nemo, Small 3; Mixtral."""

from typing import Any

from hex_llm.catalog.entry import entries, sizes
from hex_llm.catalog.machines import h200, v5e

_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_7B = _MISTRAL | sizes(hidden=4096, mlp=14336, layers=32, heads=32, kv_heads=8)
_V0_1 = {"rope_theta": 10000.0, "sliding_window": 4096}
_TEKKEN = {"vocab_size": 131072}

_MIXTRAL = _MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_8X22B = _MIXTRAL | sizes(hidden=6144, mlp=16384, layers=56, heads=48, kv_heads=8) | {"max_position_embeddings": 65536}

MISTRAL = (
    *entries(
        "mistralai/Mistral-7B-v0.1",
        "mistralai/Mistral-7B-Instruct-v0.1",
        parameters=7_241_732_096,
        config=_7B | _V0_1,
        recommended=v5e(4),
    ),
    *entries("mistralai/Mistral-7B-Instruct-v0.2", parameters=7_241_732_096, config=_7B, recommended=v5e(4)),
    *entries(
        "mistralai/Mistral-7B-v0.3",
        "mistralai/Mistral-7B-Instruct-v0.3",
        parameters=7_248_023_552,
        config=_7B | {"vocab_size": 32768},
        recommended=v5e(4),
    ),
    *entries(
        "mistralai/Mistral-Nemo-Base-2407",
        "mistralai/Mistral-Nemo-Instruct-2407",
        parameters=12_247_782_400,
        config=_MISTRAL
        | sizes(hidden=5120, mlp=14336, layers=40, heads=32, kv_heads=8, head_dim=128)
        | _TEKKEN
        | {"max_position_embeddings": 128000},
        recommended=v5e(4),
    ),
    *entries(
        "mistralai/Mistral-Small-24B-Base-2501",
        "mistralai/Mistral-Small-24B-Instruct-2501",
        parameters=23_572_403_200,
        config=_MISTRAL
        | sizes(hidden=5120, mlp=32768, layers=40, heads=32, kv_heads=8, head_dim=128)
        | _TEKKEN
        | {"rope_theta": 100000000.0},
        recommended=v5e(8),
    ),
    *entries(
        "mistralai/Mixtral-8x7B-v0.1",
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        parameters=46_702_792_704,
        config=_MIXTRAL | sizes(hidden=4096, mlp=14336, layers=32, heads=32, kv_heads=8),
        recommended=v5e(8),
    ),
    *entries(
        "mistralai/Mixtral-8x22B-v0.1",
        parameters=140_620_634_112,
        config=_8X22B,
        recommended=h200(length=65536),
    ),
    *entries(
        "mistralai/Mixtral-8x22B-Instruct-v0.1",
        parameters=140_630_071_296,
        config=_8X22B | {"vocab_size": 32768},
        recommended=h200(length=65536),
    ),
)
