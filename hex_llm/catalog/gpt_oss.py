"""gpt-oss."""

from dataclasses import replace
from typing import Any

from hex_llm.catalog.entry import entries, sizes
from hex_llm.catalog.machines import v5e

_LAYERS = 24

_20B: dict[str, Any] = sizes(hidden=2880, mlp=2880, layers=_LAYERS, heads=64, kv_heads=8, head_dim=64) | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_act": "silu",
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * (_LAYERS // 2),
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}

_PLAIN = entries("openai/gpt-oss-20b", parameters=20_914_757_184, config=_20B, recommended=v5e(4))
GPT_OSS = tuple(replace(entry, bits=4) for entry in _PLAIN)  # of the experts, which are nearly all of it
