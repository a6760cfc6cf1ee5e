"""What `h200.py` measures with: the model's shape, the flags of the servers and engines, and the sizes of the loads."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Reference rates of the card, by which shares are counted: bytes of a copy both ways, and bf16 multiplications.
COPY_TBPS = 4.29
MATMUL_TFLOPS = 790.0

# TensorRT-LLM's published output tokens per second, one H200, FP8 weights, for the shapes of the part `offline`.
TENSORRT_LLM_FP8 = {
    (128, 128): 27_911, (128, 2048): 26_221, (500, 2000): 20_770, (1000, 1000): 17_744, (2048, 128): 3_538,
    (2048, 2048): 12_194, (5000, 500): 3_902,
}  # fmt: skip

LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# The same with little in it, for a CPU: its figures say nothing, but that the script works.
TINY: Mapping[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
}


@dataclass(frozen=True, slots=True)
class Flags:
    """Of the servers and engines; `step` has those of `serve`, and what that has compiled."""

    serve: tuple[str, ...] = (
        "--max_model_len=4096",
        "--max_decode_seqs=128",
        "--enable_chunked_prefill",
        "--disable_log_requests",
    )
    # Few sequences; what is compiled is compiled when the requests before the measurement ask for it.
    prefill: tuple[str, ...] = (
        "--max_model_len=40960",
        "--max_decode_seqs=8",
        "--enable_chunked_prefill",
        "--enable_prefix_cache_hbm",
        "--no-warmup",
        "--disable_log_requests",
    )
    # A prompt is a step of its own, and every step has the same shape however many requests there are.
    parity: tuple[str, ...] = (
        "--max_model_len=1024",
        "--max_decode_seqs=64",
        "--decode_seqs_padding=64",
        "--max_num_batched_tokens=512",
        "--prefill_len_padding=512",
        "--num_blocks=2048",
        "--no-warmup",
    )
    # Nobody waits for a token: large steps, and few shapes of them.
    offline: tuple[str, ...] = (
        "--max_model_len=8192",
        "--max_decode_seqs=512",
        "--decode_seqs_padding=64",
        "--enable_chunked_prefill",
        "--max_num_batched_tokens=2048",
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of it is measured."""

    serve_tokens: tuple[int, int] = (1000, 1000)  # in, out
    serve_runs: tuple[tuple[int, int], ...] = ((64, 256), (128, 384))  # clients, prompts
    step_batches: tuple[int, ...] = (64, 128, 1)
    step_context: int = 1500
    steps: int = 100
    # Decoded before: prompts leave the card's clock low, as its power is limited, and it takes a second or two to rise.
    settle_steps: int = 250
    traced_steps: int = 40
    traced_batch: int = 64
    prefill_tokens: int = 8192
    prefix_tokens: int = 32768
    prefill_repeats: int = 5
    prefix_repeats: int = 3
    kernel_repeats: int = 20
    kernel_copy_mib: int = 2048
    kernel_page: int = 32
    kernel_contexts: Mapping[str, tuple[int, int, int]] = dataclasses.field(  # sequences, shortest, longest
        default_factory=lambda: {
            "b64": (64, 1500, 1500),
            "b128": (128, 1500, 1500),
            "ragged": (64, 1, 4000),
            "b8": (8, 1500, 1500),
            "b1": (1, 1500, 1500),
        }
    )
    kernel_checks: int = 20  # kinds of batches
    kernel_check_context: int = 2000
    peer_requests: int = 64
    peer_tokens: tuple[int, int] = (1000, 48)
    parity_requests: int = 48
    parity_alone: int = 8
    parity_tokens: tuple[int, int] = (500, 64)
    parity_prompts: int = 8
    # In, out, and requests: as many as the cache holds. Where time is short there are fewer, and so less in a step.
    offline_runs: tuple[tuple[int, int, int], ...] = (
        (128, 128, 2048),
        (1000, 1000, 416),
        (2048, 128, 384),
        (500, 2000, 320),
        (5000, 500, 128),
        (128, 2048, 384),
        (2048, 2048, 192),
    )


QUICK = Sizes(
    serve_runs=((64, 64), (128, 128)),
    serve_tokens=(1000, 200),
    steps=40,
    settle_steps=40,
    prefill_repeats=2,
    prefix_repeats=1,
    kernel_repeats=10,
    kernel_checks=4,
    peer_tokens=(1000, 16),
    parity_alone=3,
    parity_tokens=(500, 24),
    parity_prompts=3,
    offline_runs=((128, 128, 256), (1000, 1000, 64)),
)
TINY_SIZES = Sizes(
    serve_tokens=(40, 20),
    serve_runs=((4, 8), (8, 16)),
    step_batches=(8, 16, 1),
    step_context=120,
    steps=10,
    settle_steps=10,
    traced_steps=6,
    traced_batch=8,
    prefill_tokens=256,
    prefix_tokens=768,
    prefill_repeats=2,
    prefix_repeats=2,
    kernel_repeats=2,
    kernel_copy_mib=8,
    kernel_page=8,
    kernel_contexts={"b64": (4, 50, 50), "b128": (8, 50, 50), "ragged": (4, 1, 90), "b8": (2, 50, 50)},
    kernel_checks=2,
    kernel_check_context=100,
    peer_requests=4,
    peer_tokens=(30, 6),
    parity_requests=8,
    parity_alone=2,
    parity_tokens=(30, 12),
    parity_prompts=2,
    offline_runs=((16, 16, 16), (40, 10, 8)),
)
TINY_FLAGS = Flags(
    serve=("--max_model_len=256", "--max_decode_seqs=16", "--decode_seqs_padding=8", "--prefill_len_padding=128",
           "--max_num_batched_tokens=256", "--enable_chunked_prefill", "--num_blocks=256"),
    prefill=("--max_model_len=1024", "--max_decode_seqs=8", "--max_num_batched_tokens=256", "--num_blocks=256",
             "--prefill_len_padding=32", "--enable_chunked_prefill", "--enable_prefix_cache_hbm", "--no-warmup"),
    parity=("--max_model_len=256", "--max_decode_seqs=8", "--decode_seqs_padding=8", "--max_num_batched_tokens=256",
            "--prefill_len_padding=256", "--num_blocks=256", "--no-warmup"),
    offline=("--max_model_len=256", "--max_decode_seqs=16", "--decode_seqs_padding=8", "--prefill_len_padding=128",
             "--max_num_batched_tokens=256", "--enable_chunked_prefill", "--num_blocks=256"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """A shape with its flags and sizes."""

    shape: Mapping[str, Any]
    flags: Flags
    sizes: Sizes


PLANS = {
    "8b": Plan(LLAMA_8B, Flags(), Sizes()),
    "8b-quick": Plan(LLAMA_8B, Flags(), QUICK),
    "tiny": Plan(TINY, TINY_FLAGS, TINY_SIZES),
}


def layer_weights(shape: Mapping[str, Any]) -> int:
    """Weights that every token is multiplied with, those of the head not among them."""
    hidden, width = shape["hidden_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = hidden * width * (2 * heads + 2 * kv_heads)
    return shape["num_hidden_layers"] * (attention + 3 * hidden * shape["intermediate_size"])


def prefill_flops(shape: Mapping[str, Any], tokens: int) -> float:
    """Of a prompt: its weights, and attention of each token to those before it."""
    width = shape["num_attention_heads"] * shape["head_dim"]
    attention = 4 * width * tokens**2 / 2
    return 2.0 * layer_weights(shape) * tokens + shape["num_hidden_layers"] * attention
