"""Adapters as PEFT writes them, for tests."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hex_llm.lora.adapter import Modules

LAYERS, HIDDEN, HEADS, MLP = 2, 16, 24, 40


def modules_of_llama() -> Modules:
    sizes = {
        "self_attn.q_proj": (HIDDEN, HEADS),
        "self_attn.k_proj": (HIDDEN, 8),
        "self_attn.v_proj": (HIDDEN, 8),
        "self_attn.o_proj": (HEADS, HIDDEN),
        "mlp.gate_proj": (HIDDEN, MLP),
        "mlp.up_proj": (HIDDEN, MLP),
        "mlp.down_proj": (MLP, HIDDEN),
    }
    return {f"model.layers.{layer}.{name}": size for layer in range(LAYERS) for name, size in sizes.items()}


MODULES = modules_of_llama()
Q0 = "model.layers.0.self_attn.q_proj"


def peft_config(**fields: Any) -> dict[str, Any]:
    """With all that PEFT 0.21 writes of a plain LoRA."""
    return {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "somebody/base",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "kasa_config": None,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "lora_ga_config": None,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "monteclora_config": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_bdlora": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
        "velora_config": None,
        **fields,
    }


def random_pairs(
    *names: str, rank: int = 4, modules: Modules = MODULES, dtype: Any = np.float32, seed: int = 0
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B of modules."""
    rng = np.random.default_rng(seed)

    def pair(size_in: int, size_out: int) -> tuple[np.ndarray, np.ndarray]:
        a, b = rng.normal(size=(rank, size_in)), rng.normal(size=(size_out, rank))
        return a.astype(np.float32).astype(dtype), b.astype(np.float32).astype(dtype)

    return {name: pair(*modules[name]) for name in names}


def tensors_of(
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], prefix: str = "base_model.model."
) -> dict[str, np.ndarray]:
    halves = (
        (f"{prefix}{name}.lora_{half}.weight", value)
        for name, pair in pairs.items()
        for half, value in zip("AB", pair, strict=True)
    )
    return dict(halves)


def write_adapter(folder: Path, config: Any, tensors: Mapping[str, np.ndarray], num_files: int = 1) -> Path:
    """`config` is a JSON value, or text to be written as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    names = sorted(tensors)
    for number in range(num_files):
        part = f"-{number + 1:05}-of-{num_files:05}" if num_files > 1 else ""
        save_file(
            {name: tensors[name] for name in names[number::num_files]}, folder / f"adapter_model{part}.safetensors"
        )
    return folder


def write_good(folder: Path, seed: int = 0, rank: int = 4, num_files: int = 1) -> Path:
    return write_adapter(
        folder, peft_config(r=rank), tensors_of(random_pairs(*MODULES, rank=rank, seed=seed)), num_files
    )
