"""Writes the benchmark's random Llama as a folder in Hugging Face layout, with the prompts that every engine gets."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 12, 768, 12, 4, 64, 2048, 16384
CONTEXT = 2048
MAX_PROMPTS, MAX_PROMPT_LEN = 64, 1024
BOS, EOS = 0, 1


def ensure_checkpoint(folder: Path) -> Path:
    """The folder, written first if it is not there yet; the prompts lie next to the weights in prompts.json."""
    if not (folder / "prompts.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
        texts = {
            "config.json": _config(),
            "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS},
            "tokenizer.json": _tokenizer(),
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "model_max_length": CONTEXT,
            },
            "prompts.json": _prompts(),  # last: its presence says that the folder is whole
        }
        for name, value in texts.items():
            (folder / name).write_text(json.dumps(value, ensure_ascii=False))
    return folder


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def random(rows: int, columns: int) -> np.ndarray:
        return (0.02 * rng.standard_normal((rows, columns), dtype=np.float32)).astype(ml_dtypes.bfloat16)

    ones = np.ones(HIDDEN, ml_dtypes.bfloat16)
    weights = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": random(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": ones,
            prefix + "self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            prefix + "post_attention_layernorm.weight": ones,
            prefix + "mlp.gate_proj.weight": random(FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": random(FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": random(HIDDEN, FFN),
        }
    return weights


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
    }


def vocabulary() -> list[str]:
    """A name for every id: two special tokens, the 256 bytes in byte-level spelling, and fillers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]
    fillers = [f"<w{place}>" for place in range(VOCAB - 2 - len(letters))]
    return ["<s>", "</s>", *letters, *fillers]


def _tokenizer() -> dict[str, object]:
    special = [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, text in ((BOS, "<s>"), (EOS, "</s>"))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: token for token, text in enumerate(vocabulary())},
            "merges": [],
        },
    }


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return rng.integers(EOS + 1, VOCAB, (MAX_PROMPTS, MAX_PROMPT_LEN)).tolist()
