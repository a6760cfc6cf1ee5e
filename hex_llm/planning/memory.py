"""What lies in a device's memory when a model is served, as `runner/memory` and `build` plan it at a start.

There the sums are exact, because the programs are compiled first. Here temporaries are estimated.
"""

from dataclasses import dataclass

from hex_llm.catalog.chips import Chip
from hex_llm.config import Config
from hex_llm.flags import flags_of
from hex_llm.planning.precision import PLAIN, Precision
from hex_llm.planning.shape import Shape

# As hex_llm/build.py and runner/xla_options.py have them, which cannot be imported without JAX; a test compares.
STEP_TOKENS = 2048
GPU_STEP_TOKENS = 8192
GPU_SHARE = 0.93  # of a GPU's memory that JAX takes
BLOCK: int = next(flag.default for flag in flags_of(Config) if flag.name == "block_size")


@dataclass(frozen=True, slots=True)
class Room:
    """Of each device, in bytes, where not said otherwise."""

    usable: int
    weights: int
    temporaries: int  # with what is kept of the sequences besides keys and values
    cache: int  # what the KV cache takes
    cache_tokens: int  # that it holds, on all devices of a copy together
    longest: int  # tokens of the longest sequence that would fit


def on_gpu(chip: Chip) -> bool:
    return chip.vmem is None


def lower_bound(parameters: int, precision: Precision) -> float:
    """Of all weights, as the guides reckon: model_size * (num_bits / 8)."""
    return parameters * precision.nominal_bits / 8


def weight_bytes(shape: Shape, precision: Precision, devices: int) -> int:
    """On each device."""
    dense = PLAIN if precision.experts_only else precision.bytes
    plain = shape.head * (1 if shape.tied else 2) * PLAIN
    queries, kv_heads = heads_on(shape, devices)
    more = devices * (queries + kv_heads) - shape.heads - shape.kv_heads
    twice = shape.layers * 2 * shape.embed * more * shape.head_dim
    return round(((shape.dense + twice) * dense + shape.routed * precision.bytes + plain) / devices)


def kv_bytes_per_token(shape: Shape, precision: Precision, devices: int) -> float:
    """On each device."""
    return shape.layers * 2 * heads_on(shape, devices)[1] * precision.head_bytes(shape.head_dim)


def heads_on(shape: Shape, devices: int) -> tuple[int, int]:
    """Heads of queries, and of keys and values, on each device, as `models/split` deals them: where there are more
    devices than heads of keys and values, several have the same ones, and what does not divide is filled up."""
    kv_heads = -(-shape.kv_heads // devices)
    copies = devices * kv_heads // shape.kv_heads
    return kv_heads * -(-(shape.heads // shape.kv_heads) // copies), kv_heads


def plan_room(
    shape: Shape,
    precision: Precision,
    chip: Chip,
    devices: int,
    *,
    factor: float,
    max_model_len: int,
    max_decode_seqs: int,
) -> Room:
    """`factor` is --hbm_utilization_factor: the KV cache's share of what the rest leaves."""
    usable = int(chip.usable * GPU_SHARE) if on_gpu(chip) else chip.usable
    weights = weight_bytes(shape, precision, devices)
    temporaries = _temporaries(shape, chip, devices, max_decode_seqs)
    block = BLOCK * kv_bytes_per_token(shape, precision, devices)
    # One block is nobody's.
    fitting = max(int(factor * (usable - weights - temporaries) // block) - 1, 0)
    # More than all sequences at their longest is not allocated.
    used = min(fitting, max_decode_seqs * -(-max_model_len // BLOCK))
    return Room(
        usable=usable,
        weights=weights,
        temporaries=temporaries,
        cache=round(used * block),
        cache_tokens=used * BLOCK,
        longest=min(fitting * BLOCK, shape.context),
    )


def _temporaries(shape: Shape, chip: Chip, devices: int, max_decode_seqs: int) -> int:
    """Besides weights and cache: what is kept of every sequence, and the larger of computing a step and choosing its
    tokens. `bench/tpu_aot` asks the TPU's compiler for it; docs/performance.md, "What fits", has its answers.
    """
    tokens = GPU_STEP_TOKENS if on_gpu(chip) else STEP_TOKENS
    # The stream, its norm, a sum on its way and its parts; a layer's heads, or what its MLP has in between.
    experts = max(shape.experts_per_token, 1)
    heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    computing = PLAIN * tokens * (4 * shape.embed + max(3 * shape.mlp * experts, heads) / devices)
    # Whole on every device, in float32: counts for penalties, and some six arrays on the way to a token.
    logits = 4 * max_decode_seqs * shape.vocab
    return round(logits + max(6 * logits, computing))
