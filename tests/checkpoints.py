"""Writes tiny Llama models as Hugging Face folders, without torch.

Tensor names and shapes are written out here, not derived from the package: the loader's tests compare the two.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# The first three ids of the tokenizer; the 256 bytes follow.
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def llama_config(**changes: Any) -> dict[str, Any]:
    """config.json of a model with a hundred thousand weights. A change to None leaves the field out."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    return {name: value for name, value in config.items() if value is not None}


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that transformers saves for a config."""
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // num_heads)
    q, kv = num_heads * head_dim, config.get("num_key_value_heads", num_heads) * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        linears = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        for name, shape in linears.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
            biased = config.get("attention_bias" if name.startswith("self_attn") else "mlp_bias", False)
            if biased:
                shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{name}.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def random_tensors(config: dict[str, Any], *, seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Weights large enough that attention looks at some tokens more than at others."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in llama_shapes(config).items():
        values = rng.normal(0, 0.15, shape) + ("norm" in name)
        tensors[name] = values.astype(dtype)
    return tensors


def write_tensors(folder: Path, tensors: dict[str, np.ndarray], *, num_files: int = 1) -> None:
    """As transformers does: one file, or several and an index."""
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for i, names in enumerate(np.array_split(sorted(tensors), num_files), start=1):
        file = f"model-{i:05}-of-{num_files:05}.safetensors"
        save_file({str(name): tensors[name] for name in names}, folder / file, {"format": "pt"})
        weight_map |= {str(name): file for name in names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are bytes, with a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, bos, eos = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2]}))


def write_llama(folder: Path, *, seed: int = 0, dtype: Any = np.float32, num_files: int = 1, **changes: Any) -> Path:
    """A whole model: config, weights and tokenizer. `changes` go to `llama_config`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder, random_tensors(config, seed=seed, dtype=dtype), num_files=num_files)
    write_tokenizer(folder)
    return folder
