"""SmolLM3."""

from typing import Any

from hex_llm.catalog.entry import entries, sizes
from hex_llm.catalog.machines import v5e

_3B: dict[str, Any] = sizes(hidden=2048, mlp=11008, layers=36, heads=16, kv_heads=4) | {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "vocab_size": 128256,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 65536,
    "rope_theta": 5000000.0,
    "no_rope_layer_interval": 4,
    "use_sliding_window": False,
}

SMOLLM3 = entries("HuggingFaceTB/SmolLM3-3B", parameters=3_075_098_624, config=_3B, recommended=v5e(1))
