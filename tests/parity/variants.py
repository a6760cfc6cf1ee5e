"""The tiny random models that are compared with transformers: every architecture in several forms."""

from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    # Ten times a newborn model's spread: attention then looks at some tokens more than at others, so that
    # a wrong rotation or a wrong mask shows.
    "initializer_range": 0.2,
}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_HALF = {"head_dim": 8}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _llama3(factor: float) -> dict[str, Any]:
    # The original context is short, so that waves are kept, blended and slowed within the tests' lengths.
    return {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def _yarn(**changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
    return {"rope_parameters": rope | changes}


def _longrope(original: int) -> dict[str, Any]:
    """With an amplitude of its own, and other factors in long sequences than in short ones."""
    return {
        "max_position_embeddings": 4 * original,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.3, 2.0],
            "long_factor": [1.5, 2.5, 4.0, 9.0],
            "original_max_position_embeddings": original,
        },
    }


def _family(
    model_type: str, model_class: str, common: dict[str, Any], variants: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The variants of one architecture: what is common to them, and what each changes."""
    named = {"model_type": model_type, "class": model_class}
    return {name: _SMALL | common | changes | named for name, changes in variants.items()}


VARIANTS: dict[str, dict[str, Any]] = {
    **_family(
        "llama",
        "LlamaForCausalLM",
        _PLAIN_ROPE,
        {
            "multi-head": {"num_key_value_heads": 8},
            "grouped": {},
            "two-kv-heads": {"num_key_value_heads": 2},
            "theta-1e6": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
            "rope-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
            "rope-llama3-8": {"rope_parameters": _llama3(8.0)},
            "rope-llama3-32-tied": {"rope_parameters": _llama3(32.0), "tie_word_embeddings": True},
            "rope-yarn": _yarn(),
            "rope-yarn-attention-factor": _yarn(attention_factor=1.7, beta_fast=8.0, beta_slow=2.0, truncate=False),
            "tied": {"tie_word_embeddings": True},
            "wide-heads": {"head_dim": 16},
            "biased": {"attention_bias": True, "mlp_bias": True},
            "several-files": {"max_shard_size": "100KB"},
        },
    ),
    **_family(
        "smollm3",
        "SmolLM3ForCausalLM",
        _PLAIN_ROPE | {"num_hidden_layers": 4, "pad_token_id": 0},
        {
            "smollm3": {},
            "smollm3-untied-yarn": {"tie_word_embeddings": False, "num_key_value_heads": 2, **_yarn()},
            "smollm3-biased-window": {
                "attention_bias": True,
                "mlp_bias": True,
                "no_rope_layers": [0, 1, 1, 0],
                "use_sliding_window": True,
                "sliding_window": 24,
            },
        },
    ),
    **_family(
        "mistral",
        "MistralForCausalLM",
        _PLAIN_ROPE,
        {
            "mistral": {"sliding_window": None},
            "mistral-window": {"sliding_window": 24, "head_dim": 16},
            "mistral-tied-window-of-a-page": {"sliding_window": 16, "tie_word_embeddings": True},
        },
    ),
    **_family(
        "qwen2",
        "Qwen2ForCausalLM",
        _PLAIN_ROPE,
        {
            "qwen2": {},
            "qwen2-tied-odd-heads": {
                "hidden_size": 112,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
            },
            "qwen2-window": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
            "qwen2-window-in-some-layers": {
                "use_sliding_window": True,
                "sliding_window": 24,
                "max_window_layers": 1,
                "num_hidden_layers": 3,
            },
            "qwen2-yarn": _yarn(),
        },
    ),
    **_family(
        "qwen3",
        "Qwen3ForCausalLM",
        _PLAIN_ROPE | {"head_dim": 16},
        {
            "qwen3": {},
            "qwen3-tied": {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 2},
            "qwen3-biased-window": {
                "attention_bias": True,
                "use_sliding_window": True,
                "sliding_window": 24,
                "max_window_layers": 1,
            },
        },
    ),
    **_family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _PLAIN_ROPE | {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3},
        {
            "qwen3-moe": {"norm_topk_prob": True},
            "qwen3-moe-shares-as-they-are": {"norm_topk_prob": False, "num_experts": 16, "num_experts_per_tok": 8},
            "qwen3-moe-tied": {"norm_topk_prob": True, "tie_word_embeddings": True, "num_experts_per_tok": 1},
        },
    ),
    **_family(
        "mixtral",
        "MixtralForCausalLM",
        _PLAIN_ROPE,
        {
            "mixtral": {},
            "mixtral-window-tied": {"sliding_window": 24, "tie_word_embeddings": True},
            "mixtral-five-experts-one-token-each": {"num_local_experts": 5, "num_experts_per_tok": 1},
            "mixtral-all-experts": {"num_local_experts": 4, "num_experts_per_tok": 4},
        },
    ),
    **_family(
        "phi3",
        "Phi3ForCausalLM",
        _PLAIN_ROPE | {"pad_token_id": 0},
        {
            "phi3": {},
            "phi3-window": {"sliding_window": 47, "num_key_value_heads": 8},
            "phi3-short-of-the-switch": _longrope(128),
            "phi3-beyond-the-switch": _longrope(32),
            "phi3-tied": {"tie_word_embeddings": True, "num_key_value_heads": 2},
        },
    ),
    **_family(
        "gemma",
        "GemmaForCausalLM",
        _PLAIN_ROPE | {"head_dim": 16},
        {
            "gemma": {},
            "gemma-multi-head": {"num_key_value_heads": 8},
            "gemma-untied-grouped": {"tie_word_embeddings": False, "num_key_value_heads": 2},
        },
    ),
    **_family(
        "gemma2",
        "Gemma2ForCausalLM",
        _PLAIN_ROPE | {"head_dim": 16, "sliding_window": 24},
        {
            # Caps so low that they show.
            "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
            "gemma2-uncapped": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "gemma2-query-scale": {"query_pre_attn_scalar": 40, "num_hidden_layers": 3},
        },
    ),
    **_family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 7, "query_pre_attn_scalar": 16},
        {
            "gemma3": {},
            "gemma3-ropes": {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                },
                "num_key_value_heads": 2,
            },
            "gemma3-untied": {"tie_word_embeddings": False, "layer_types": ["full_attention"] * 7},
        },
    ),
    "gemma3-with-vision": {
        "model_type": "gemma3",
        "class": "Gemma3ForConditionalGeneration",
        "text_config": _SMALL | {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
        "vision_config": _VISION,
        "tie_word_embeddings": False,  # of the whole, which is what transformers goes by
        "mm_tokens_per_image": 4,
        "image_token_index": 319,
        "boi_token_index": 317,
        "eoi_token_index": 318,
    },
    **_family(
        "llama4_text",
        "Llama4ForCausalLM",
        {"num_hidden_layers": 4, "num_local_experts": 4, "head_dim": 16, "pad_token_id": 0},
        {
            "llama4": {"attention_chunk_size": 32, "floor_scale": 16, **_PLAIN_ROPE},
            "llama4-llama3-rope": {
                "attention_chunk_size": 40,
                "rope_parameters": _llama3(16.0) | {"high_freq_factor": 1.0},
                "num_attention_heads": 10,
                "num_key_value_heads": 2,
            },
            "llama4-plain-heads-tied": {
                "use_qk_norm": False,
                "attn_temperature_tuning": False,
                "tie_word_embeddings": True,
                "no_rope_layers": [0, 1, 1, 0],
                **_PLAIN_ROPE,
            },
            "llama4-biased": {"attention_bias": True, "num_hidden_layers": 2, **_PLAIN_ROPE},
        },
    ),
    "llama4-with-vision": {
        "model_type": "llama4",
        "class": "Llama4ForConditionalGeneration",
        "text_config": _SMALL
        | _PLAIN_ROPE
        | {"num_hidden_layers": 4, "num_local_experts": 4, "head_dim": 16, "attention_chunk_size": 32},
        "vision_config": _VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        "image_token_index": 319,
        "boi_token_index": 317,
        "eoi_token_index": 318,
    },
    **_family(
        "gpt_oss",
        "GptOssForCausalLM",
        {"head_dim": 16, "sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            "gpt-oss": _yarn(truncate=False, rope_theta=1500.0),
            "gpt-oss-plain-rope": _PLAIN_ROPE | {"num_experts_per_tok": 4, "num_key_value_heads": 2},
            "gpt-oss-unbiased-tied": {"attention_bias": False, "tie_word_embeddings": True, **_yarn()},
        },
    ),
}
