"""Qwen2, Qwen2.5, Qwen3."""

from typing import Any

from hex_llm.catalog.entry import Entry, Recommendation, entries, sizes
from hex_llm.catalog.machines import v5e, v6e

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
_TIED = {"vocab_size": 151936, "tie_word_embeddings": True}

_QWEN2 = _COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
_0_5B = _QWEN2 | _TIED | sizes(hidden=896, mlp=4864, layers=24, heads=14, kv_heads=2)
_1_5B = _QWEN2 | _TIED | sizes(hidden=1536, mlp=8960, layers=28, heads=12, kv_heads=2)
_3B = _QWEN2 | _TIED | sizes(hidden=2048, mlp=11008, layers=36, heads=16, kv_heads=2)
_7B = _QWEN2 | sizes(hidden=3584, mlp=18944, layers=28, heads=28, kv_heads=4)
_14B = _QWEN2 | sizes(hidden=5120, mlp=13824, layers=48, heads=40, kv_heads=8)
_32B = _QWEN2 | sizes(hidden=5120, mlp=27648, layers=64, heads=40, kv_heads=8)
_72B = _QWEN2 | sizes(hidden=8192, mlp=29568, layers=80, heads=64, kv_heads=8)

_QWEN3 = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
_30B_A3B = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _on(chips: int, context: int) -> tuple[Recommendation, ...]:
    """One chip holds 8192 tokens beside a small model; more hold the whole context."""
    return v5e(chips, length=min(context, 8192) if chips == 1 else context)


def _qwen2(
    name: str, parameters: int, config: dict[str, Any], context: int, *, chips: int, eps: float = 1e-6
) -> tuple[Entry, ...]:
    """A model, whose norms may have an epsilon of their own, and the one that follows instructions."""
    base = config | {"max_position_embeddings": context, "rms_norm_eps": eps}
    instruct = config | {"max_position_embeddings": 32768}
    return (
        *entries(name, parameters=parameters, config=base, recommended=_on(chips, context)),
        *entries(f"{name}-Instruct", parameters=parameters, config=instruct, recommended=_on(chips, 32768)),
    )


QWEN = (
    *_qwen2("Qwen/Qwen2-0.5B", 494_032_768, _0_5B, 131072, chips=1),
    *_qwen2("Qwen/Qwen2-1.5B", 1_543_714_304, _1_5B, 131072, chips=1),
    *_qwen2("Qwen/Qwen2-7B", 7_615_616_512, _7B, 131072, chips=4),
    *_qwen2("Qwen/Qwen2-72B", 72_706_203_648, _72B, 131072, chips=16, eps=1e-5),
    *_qwen2("Qwen/Qwen2.5-0.5B", 494_032_768, _0_5B, 32768, chips=1),
    *_qwen2("Qwen/Qwen2.5-1.5B", 1_543_714_304, _1_5B, 131072, chips=1),
    *_qwen2("Qwen/Qwen2.5-3B", 3_085_938_688, _3B, 32768, chips=1),
    *_qwen2("Qwen/Qwen2.5-7B", 7_615_616_512, _7B, 131072, chips=4),
    *_qwen2("Qwen/Qwen2.5-14B", 14_770_033_664, _14B, 131072, chips=4, eps=1e-5),
    *_qwen2("Qwen/Qwen2.5-32B", 32_763_876_352, _32B, 131072, chips=8, eps=1e-5),
    *_qwen2("Qwen/Qwen2.5-72B", 72_706_203_648, _72B, 131072, chips=16, eps=1e-5),
    *entries(
        "Qwen/Qwen3-0.6B",
        parameters=596_049_920,
        config=_QWEN3 | _TIED | sizes(hidden=1024, mlp=3072, layers=28, heads=16, kv_heads=8, head_dim=128),
        recommended=_on(1, 40960),
    ),
    *entries(
        "Qwen/Qwen3-1.7B",
        parameters=1_720_574_976,
        config=_QWEN3 | _TIED | sizes(hidden=2048, mlp=6144, layers=28, heads=16, kv_heads=8),
        recommended=_on(1, 40960),
    ),
    *entries(
        "Qwen/Qwen3-4B",
        parameters=4_022_468_096,
        config=_QWEN3 | _TIED | sizes(hidden=2560, mlp=9728, layers=36, heads=32, kv_heads=8, head_dim=128),
        recommended=_on(1, 40960),
    ),
    *entries(
        "Qwen/Qwen3-8B",
        parameters=8_190_735_360,
        config=_QWEN3 | sizes(hidden=4096, mlp=12288, layers=36, heads=32, kv_heads=8),
        recommended=_on(4, 40960),
    ),
    *entries(
        "Qwen/Qwen3-14B",
        parameters=14_768_307_200,
        config=_QWEN3 | sizes(hidden=5120, mlp=17408, layers=40, heads=40, kv_heads=8),
        recommended=_on(4, 40960),
    ),
    *entries(
        "Qwen/Qwen3-32B",
        parameters=32_762_123_264,
        config=_QWEN3 | sizes(hidden=5120, mlp=25600, layers=64, heads=64, kv_heads=8, head_dim=128),
        recommended=_on(8, 40960),
    ),
    *entries(
        "Qwen/Qwen3-30B-A3B",
        parameters=30_532_122_624,
        config=_30B_A3B | sizes(hidden=2048, mlp=6144, layers=48, heads=32, kv_heads=4, head_dim=128),
        recommended=v6e(4, length=40960),
    ),
)
