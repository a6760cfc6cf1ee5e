"""A Llama forward pass in plain JAX for training, its weights under their Hugging Face names."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from training.tokenizer import BEGIN_ID, END_ID, END_OF_TEXT_ID, VOCABULARY_SIZE

Weights = dict[str, jax.Array]


@dataclass(frozen=True)
class Arch:
    """The numbers of the default model; every size divides by 4, widths by 128, also when cut in four."""

    vocabulary: int = VOCABULARY_SIZE
    width: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    ffn: int = 1024
    context: int = 2048
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5


def weight_shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    """Checkpoint name to shape; matrices are [out, in]."""
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocabulary, arch.width)}
    for index in range(arch.layers):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (arch.width,),
            f"{layer}.self_attn.q_proj.weight": (queries, arch.width),
            f"{layer}.self_attn.k_proj.weight": (keys, arch.width),
            f"{layer}.self_attn.v_proj.weight": (keys, arch.width),
            f"{layer}.self_attn.o_proj.weight": (arch.width, queries),
            f"{layer}.post_attention_layernorm.weight": (arch.width,),
            f"{layer}.mlp.gate_proj.weight": (arch.ffn, arch.width),
            f"{layer}.mlp.up_proj.weight": (arch.ffn, arch.width),
            f"{layer}.mlp.down_proj.weight": (arch.width, arch.ffn),
        }
    return shapes | {"model.norm.weight": (arch.width,)}


def initial_weights(arch: Arch, seed: int) -> Weights:
    """Norms at one, matrices normal; those that write to the residual stream are scaled down by depth."""
    weights, key = {}, jax.random.key(seed)
    for index, (name, shape) in enumerate(weight_shapes(arch).items()):
        if len(shape) == 1:
            weights[name] = jnp.ones(shape, jnp.float32)
            continue
        scale = 0.02 if "embed" in name else shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            scale *= (2 * arch.layers) ** -0.5
        weights[name] = scale * jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
    return weights


def _norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * weight).astype(x.dtype)


def _rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1).astype(x.dtype)


@jax.checkpoint
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, allowed: jax.Array) -> jax.Array:
    """q [B,T,K,G,H], k and v [B,T,K,H], allowed [B,T,T]; recomputed backwards, for the scores are the largest array."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(allowed[:, None, None], scores, -1e30)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", probabilities, v)


def hidden_states(weights: Weights, tokens: jax.Array, arch: Arch, dtype: jnp.dtype) -> jax.Array:
    """Final hidden states [B, T, D]; documents that share a row each begin with the begin token and are kept apart."""
    cast = {name: weight.astype(dtype) for name, weight in weights.items()}
    rows, length = tokens.shape
    document = jnp.cumsum(tokens == BEGIN_ID, axis=1)
    position = jnp.arange(length)
    allowed = (document[:, :, None] == document[:, None, :]) & (position[:, None] >= position[None, :])
    frequencies = arch.rope_theta ** (-jnp.arange(0, arch.head_dim, 2, dtype=jnp.float32) / arch.head_dim)
    angles = (position[:, None] * frequencies)[:, None, :]
    cosine, sine = jnp.cos(angles), jnp.sin(angles)

    x = cast["model.embed_tokens.weight"][tokens]
    for index in range(arch.layers):
        layer = f"model.layers.{index}"
        y = _norm(x, weights[f"{layer}.input_layernorm.weight"], arch.norm_epsilon)
        q = (y @ cast[f"{layer}.self_attn.q_proj.weight"].T).reshape(rows, length, arch.heads, arch.head_dim)
        k = (y @ cast[f"{layer}.self_attn.k_proj.weight"].T).reshape(rows, length, arch.kv_heads, arch.head_dim)
        v = (y @ cast[f"{layer}.self_attn.v_proj.weight"].T).reshape(rows, length, arch.kv_heads, arch.head_dim)
        q, k = _rotate(q, cosine, sine), _rotate(k, cosine, sine)
        q = q.reshape(rows, length, arch.kv_heads, arch.heads // arch.kv_heads, arch.head_dim)
        mixed = _attend(q, k, v, allowed).reshape(rows, length, arch.heads * arch.head_dim)
        x = x + mixed @ cast[f"{layer}.self_attn.o_proj.weight"].T
        y = _norm(x, weights[f"{layer}.post_attention_layernorm.weight"], arch.norm_epsilon)
        gate = jax.nn.silu(y @ cast[f"{layer}.mlp.gate_proj.weight"].T)
        up = y @ cast[f"{layer}.mlp.up_proj.weight"].T
        x = x + (gate * up) @ cast[f"{layer}.mlp.down_proj.weight"].T
    return _norm(x, weights["model.norm.weight"], arch.norm_epsilon)


def logits(weights: Weights, hidden: jax.Array) -> jax.Array:
    """Scores of the next token in float32; the head is the embedding."""
    head = weights["model.embed_tokens.weight"].astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)


def save_model(weights: Weights, arch: Arch, folder: Path) -> None:
    """config.json, generation_config.json and model.safetensors in bfloat16."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": arch.vocabulary,
        "hidden_size": arch.width,
        "intermediate_size": arch.ffn,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": arch.context,
        "rms_norm_eps": arch.norm_epsilon,
        "rope_theta": arch.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }
    generation = {"bos_token_id": BEGIN_ID, "eos_token_id": [END_ID, END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    arrays = {name: np.asarray(weight).astype(ml_dtypes.bfloat16) for name, weight in weights.items()}
    unfinished = folder / "model.safetensors.unfinished"
    save_file(arrays, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(folder / "model.safetensors")
