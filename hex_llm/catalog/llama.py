"""Llama 2, 3, 3.1, 3.2, 3.3, Guard 3 and 4, Code Llama, SmolLM2."""

from typing import Any

from hex_llm.catalog.entry import Recommendation, entries, sizes
from hex_llm.catalog.machines import v5e, v6e

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_7B = sizes(hidden=4096, mlp=11008, layers=32, heads=32, kv_heads=32)
_13B = sizes(hidden=5120, mlp=13824, layers=40, heads=40, kv_heads=40)
_8B = sizes(hidden=4096, mlp=14336, layers=32, heads=32, kv_heads=8)
_70B = sizes(hidden=8192, mlp=28672, layers=80, heads=64, kv_heads=8)
_1B = sizes(hidden=2048, mlp=8192, layers=16, heads=32, kv_heads=8)
_3B = sizes(hidden=3072, mlp=8192, layers=28, heads=24, kv_heads=8)
_34B = sizes(hidden=8192, mlp=22016, layers=48, heads=64, kv_heads=8)

_LLAMA_2 = _LLAMA | {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "float16",
}
_CODE = _LLAMA | {"vocab_size": 32016, "max_position_embeddings": 16384, "rope_theta": 1000000.0}
_LLAMA_3 = _LLAMA | {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}


def _stretched(factor: float, high_freq_factor: float = 4.0) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": 8192,
    }


_LLAMA_3_1 = _LLAMA_3 | {"max_position_embeddings": 131072, "rope_scaling": _stretched(8.0)}
_LLAMA_3_2 = _LLAMA_3_1 | {"rope_scaling": _stretched(32.0), "tie_word_embeddings": True}

_ON_ONE = v5e(1, enable_prefix_cache_hbm=True)
_ON_FOUR = v5e(4, enable_prefix_cache_hbm=True)
_ON_SIXTEEN = v5e(16, enable_prefix_cache_hbm=True)
_DISAGGREGATED = Recommendation(
    "ct5lp-hightpu-8t", {"tensor_parallel_size": 2, "disagg_topo": "3,1", "hbm_utilization_factor": 0.9}
)

_SMOL = _LLAMA | {
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}

_SCOUT: dict[str, Any] = {
    "model_type": "llama4_text",
    **sizes(hidden=5120, mlp=8192, layers=48, heads=40, kv_heads=8),
    "vocab_size": 202048,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "rope_scaling": _stretched(16.0, high_freq_factor=1.0),
    "use_qk_norm": True,
    "no_rope_layers": [],  # every fourth, then
    "attention_chunk_size": 8192,
    "intermediate_size_mlp": 16384,
    "interleave_moe_layer_step": 1,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}


def _llama_4(text: dict[str, Any], context: int) -> dict[str, Any]:
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": text | {"max_position_embeddings": context},
        "torch_dtype": "bfloat16",
    }


LLAMA = (
    *entries(
        "meta-llama/Llama-2-7b-hf",
        "meta-llama/Llama-2-7b-chat-hf",
        parameters=6_738_415_616,
        config=_LLAMA_2 | _7B,
        recommended=v5e(4),
    ),
    *entries(
        "meta-llama/Llama-2-13b-hf",
        "meta-llama/Llama-2-13b-chat-hf",
        parameters=13_015_864_320,
        config=_LLAMA_2 | _13B,
        recommended=v5e(4),
    ),
    *entries(
        "meta-llama/Llama-2-70b-hf",
        "meta-llama/Llama-2-70b-chat-hf",
        parameters=68_976_648_192,
        config=_LLAMA_2 | _70B,
        recommended=v5e(16),
    ),
    *entries(
        "codellama/CodeLlama-7b-hf",
        "codellama/CodeLlama-7b-Instruct-hf",
        parameters=6_738_546_688,
        config=_CODE | _7B,
        recommended=v5e(4),
    ),
    *entries(
        "codellama/CodeLlama-13b-hf",
        "codellama/CodeLlama-13b-Instruct-hf",
        parameters=13_016_028_160,
        config=_CODE | _13B,
        recommended=v5e(4),
    ),
    *entries(
        "codellama/CodeLlama-34b-hf",
        "codellama/CodeLlama-34b-Instruct-hf",
        parameters=33_743_970_304,
        config=_CODE | _34B | {"vocab_size": 32000},
        recommended=v5e(8),
    ),
    *entries(
        "meta-llama/Meta-Llama-3-8B",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        parameters=8_030_261_248,
        config=_LLAMA_3 | _8B,
        recommended=_ON_FOUR,
    ),
    *entries(
        "meta-llama/Meta-Llama-3-70B",
        "meta-llama/Meta-Llama-3-70B-Instruct",
        parameters=70_553_706_496,
        config=_LLAMA_3 | _70B,
        recommended=_ON_SIXTEEN,
    ),
    *entries(
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        parameters=8_030_261_248,
        config=_LLAMA_3_1 | _8B,
        recommended=(*_ON_FOUR, _DISAGGREGATED),
    ),
    *entries(
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-70B-Instruct",
        parameters=70_553_706_496,
        config=_LLAMA_3_1 | _70B,
        recommended=_ON_SIXTEEN,
    ),
    *entries(
        "meta-llama/Llama-3.2-1B",
        "meta-llama/Llama-3.2-1B-Instruct",
        parameters=1_235_814_400,
        config=_LLAMA_3_2 | _1B,
        recommended=_ON_ONE,
    ),
    *entries(
        "meta-llama/Llama-3.2-3B",
        "meta-llama/Llama-3.2-3B-Instruct",
        parameters=3_212_749_824,
        config=_LLAMA_3_2 | _3B,
        recommended=_ON_ONE,
    ),
    *entries(
        "meta-llama/Llama-3.3-70B-Instruct",
        parameters=70_553_706_496,
        config=_LLAMA_3_1 | _70B,
        recommended=(*v6e(8, enable_prefix_cache_hbm=True), *_ON_SIXTEEN),
    ),
    *entries("meta-llama/Llama-Guard-3-1B", parameters=1_235_814_400, config=_LLAMA_3_2 | _1B, recommended=_ON_ONE),
    *entries("meta-llama/Llama-Guard-3-8B", parameters=8_030_261_248, config=_LLAMA_3_1 | _8B, recommended=_ON_FOUR),
    *entries(
        "meta-llama/Llama-4-Scout-17B-16E",
        parameters=107_769_861_120,
        config=_llama_4(_SCOUT, 262144),
        recommended=v5e(16, memory=0.85, length=8192, decode_seqs_padding=128),
    ),
    *entries(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        parameters=107_769_861_120,
        config=_llama_4(_SCOUT, 10485760),
        recommended=v5e(16, memory=0.85, length=8192, decode_seqs_padding=128),
    ),
    *entries(
        "HuggingFaceTB/SmolLM2-135M",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        parameters=134_515_008,
        config=_SMOL | sizes(hidden=576, mlp=1536, layers=30, heads=9, kv_heads=3),
        recommended=v5e(1),
    ),
    *entries(
        "HuggingFaceTB/SmolLM2-360M",
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        parameters=361_821_120,
        config=_SMOL | sizes(hidden=960, mlp=2560, layers=32, heads=15, kv_heads=5),
        recommended=v5e(1),
    ),
    *entries(
        "HuggingFaceTB/SmolLM2-1.7B",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        parameters=1_711_376_384,
        config=_SMOL | sizes(hidden=2048, mlp=8192, layers=24, heads=32, kv_heads=32) | {"rope_theta": 130000.0},
        recommended=v5e(1),
    ),
)
