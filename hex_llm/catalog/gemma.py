"""Gemma, CodeGemma, Gemma 2 and 3."""

from typing import Any

from hex_llm.catalog.entry import entries, sizes
from hex_llm.catalog.machines import v5e

_COMMON: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

_GEMMA = _COMMON | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "vocab_size": 256000}
_2B = _GEMMA | sizes(hidden=2048, mlp=16384, layers=18, heads=8, kv_heads=1)
_7B = _GEMMA | sizes(hidden=3072, mlp=24576, layers=28, heads=16, kv_heads=16, head_dim=256)

_GEMMA_2 = _COMMON | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 256000,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
}

_GEMMA_3_TEXT = _COMMON | {
    "model_type": "gemma3_text",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
}
_GEMMA_3_1B = (
    _GEMMA_3_TEXT
    | sizes(hidden=1152, mlp=6912, layers=26, heads=4, kv_heads=1, head_dim=256)
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
    }
)
_GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": _GEMMA_3_TEXT
    | sizes(hidden=2560, mlp=10240, layers=34, heads=8, kv_heads=4, head_dim=256)
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "torch_dtype": "bfloat16",
}

GEMMA = (
    *entries(
        "google/gemma-2b",
        "google/gemma-2b-it",
        "google/gemma-1.1-2b-it",
        "google/codegemma-2b",
        "google/codegemma-1.1-2b",
        parameters=2_506_172_416,
        config=_2B,
        recommended=v5e(1, memory=0.6, enable_prefix_cache_hbm=True),
    ),
    *entries(
        "google/gemma-7b",
        "google/gemma-7b-it",
        "google/gemma-1.1-7b-it",
        "google/codegemma-7b",
        "google/codegemma-7b-it",
        "google/codegemma-1.1-7b-it",
        parameters=8_537_680_896,
        config=_7B,
        recommended=v5e(4, memory=0.6, enable_prefix_cache_hbm=True),
    ),
    *entries(
        "google/gemma-2-2b",
        "google/gemma-2-2b-it",
        parameters=2_614_341_888,
        config=_GEMMA_2 | sizes(hidden=2304, mlp=9216, layers=26, heads=8, kv_heads=4, head_dim=256),
        recommended=v5e(1, memory=0.6),
    ),
    *entries(
        "google/gemma-2-9b",
        "google/gemma-2-9b-it",
        parameters=9_241_705_984,
        config=_GEMMA_2 | sizes(hidden=3584, mlp=14336, layers=42, heads=16, kv_heads=8, head_dim=256),
        recommended=v5e(4, memory=0.6),
    ),
    *entries(
        "google/gemma-2-27b",
        "google/gemma-2-27b-it",
        parameters=27_227_128_320,
        config=_GEMMA_2
        | sizes(hidden=4608, mlp=36864, layers=46, heads=32, kv_heads=16, head_dim=128)
        | {"query_pre_attn_scalar": 144},
        recommended=v5e(8, memory=0.6),
    ),
    *entries(
        "google/gemma-3-1b-pt",
        "google/gemma-3-1b-it",
        parameters=999_885_952,
        config=_GEMMA_3_1B,
        recommended=v5e(1),
    ),
    *entries(
        "google/gemma-3-4b-pt",
        "google/gemma-3-4b-it",
        parameters=3_880_263_168,
        config=_GEMMA_3_4B,
        recommended=v5e(1),
    ),
)
