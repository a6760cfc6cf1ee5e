"""Tiny Llama 4 models, in float32. Transformers has all experts in one tensor, files in few bits have one for each."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.checkpoints import llama_config

EMBED, MLP, EXPERTS = 64, 96, 3
HEAD, HEADS, KV_HEADS = 16, 4, 2
PREFIX = "model.layers.0."
FEED_FORWARD = f"{PREFIX}feed_forward."

_GATED = {"gate_proj": (MLP, EMBED), "up_proj": (MLP, EMBED), "down_proj": (EMBED, MLP)}
_SHAPES = {
    "model.embed_tokens": (320, EMBED),
    f"{PREFIX}input_layernorm": (EMBED,),
    f"{PREFIX}post_attention_layernorm": (EMBED,),
    f"{PREFIX}self_attn.q_proj": (HEADS * HEAD, EMBED),
    f"{PREFIX}self_attn.k_proj": (KV_HEADS * HEAD, EMBED),
    f"{PREFIX}self_attn.v_proj": (KV_HEADS * HEAD, EMBED),
    f"{PREFIX}self_attn.o_proj": (EMBED, HEADS * HEAD),
    f"{FEED_FORWARD}router": (EXPERTS, EMBED),
    **{f"{FEED_FORWARD}shared_expert.{name}": shape for name, shape in _GATED.items()},
    **{f"{FEED_FORWARD}experts.{i}.{name}": shape for i in range(EXPERTS) for name, shape in _GATED.items()},
    "model.norm": (EMBED,),
    "lm_head": (320, EMBED),
}


def write_llama4(folder: Path) -> Path:
    """With a tensor for each expert."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    tensors = {
        f"{module}.weight": (rng.normal(0, 0.15, shape) + ("norm" in module)).astype(np.float32)
        for module, shape in _SHAPES.items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = llama_config(
        architectures=["Llama4ForCausalLM"],
        model_type="llama4_text",
        num_local_experts=EXPERTS,
        num_hidden_layers=1,
        hidden_size=EMBED,
        intermediate_size=MLP,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def join_experts(folder: Path) -> Path:
    """All of them into one tensor, in place."""
    tensors = load_file(folder / "model.safetensors")
    gate, up, down = (
        np.stack([tensors.pop(f"{FEED_FORWARD}experts.{i}.{name}.weight").T for i in range(EXPERTS)]) for name in _GATED
    )
    tensors[f"{FEED_FORWARD}experts.gate_up_proj"] = np.ascontiguousarray(np.concatenate([gate, up], axis=2))
    tensors[f"{FEED_FORWARD}experts.down_proj"] = np.ascontiguousarray(down)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
