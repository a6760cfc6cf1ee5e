"""How fast a model answers on some devices: a roofline, with the shares of it that were measured."""

import math
from dataclasses import dataclass

from hex_llm.catalog.chips import Chip
from hex_llm.planning.efficiency import CACHE, EXPOSED, HOP, LAYER, PROMPTS, PROMPTS_BF16, WEIGHTS
from hex_llm.planning.memory import kv_bytes_per_token, on_gpu
from hex_llm.planning.precision import PLAIN, Precision, Weights
from hex_llm.planning.shape import Shape


@dataclass(frozen=True, slots=True)
class Devices:
    """One copy of a model, and the devices that share it."""

    shape: Shape
    precision: Precision
    chip: Chip
    count: int  # of devices: tensor_parallel_size


@dataclass(frozen=True, slots=True)
class Load:
    """A number of requests that are always there: when one ends, the next one comes."""

    prompt: int
    output: int
    running: int


@dataclass(frozen=True, slots=True)
class Estimate:
    tokens_per_second: float  # of output
    seconds_per_token: float  # of a request, after its first one, with the prompts of others in between
    first_token_alone: float  # seconds, of a request that meets no other
    first_token_together: float  # median of requests that all come at once


def estimate(devices: Devices, load: Load) -> Estimate:
    """While all requests are answered once, there are as many decode steps of all as an answer has tokens, and as many
    prompts as there are requests between them, or in them."""
    prompt = prefill_seconds(devices, load.prompt)
    token = decode_seconds(devices, load.running, load.prompt + load.output / 2) + load.running * prompt / load.output
    return Estimate(
        tokens_per_second=load.running / token,
        seconds_per_token=token,
        first_token_alone=prompt,
        first_token_together=prompt * (load.running + 1) / 2,
    )


def decode_seconds(devices: Devices, sequences: int, context: float) -> float:
    """A step in which so many sequences get a token each; `context` is how many they have, on average."""
    shape, precision, chip, count = devices.shape, devices.precision, devices.chip, devices.count
    at_peak, as_prompts = _multiplying(devices, sequences, head=shape.head)
    seen = sum(min(context, window or context) for window in shape.windows) / shape.layers
    cache = kv_bytes_per_token(shape, precision, count) * seen * sequences
    return (
        # Many sequences are as bound to multiplying as prompts are.
        max(_reading(devices, sequences) + EXPOSED * at_peak, as_prompts)
        + cache / (chip.bandwidth * CACHE[precision.cache])
        + shape.layers * LAYER
        + _sums(devices, sequences)
    )


def prefill_seconds(devices: Devices, tokens: int) -> float:
    """A prompt by itself."""
    shape, count = devices.shape, devices.count
    _, products = _multiplying(devices, tokens, head=0)
    # A token sees those before it: half of the prompt on average, or its window.
    seen = sum(min(tokens / 2, window or tokens) for window in shape.windows)
    attention = 4 * shape.heads * shape.head_dim * tokens * seen
    multiplying = products + attention / count / (devices.chip.bf16 * PROMPTS_BF16)
    # The weights are read at least once.
    return max(multiplying, _reading(devices, tokens)) + shape.layers * LAYER + _sums(devices, tokens)


def _reading(devices: Devices, tokens: int) -> float:
    """Seconds in which the weights are read that so many tokens need. Experts are taken to be chosen alike."""
    shape, precision = devices.shape, devices.precision
    touched = 1 - (1 - shape.routed_share) ** tokens
    dense = shape.dense * (PLAIN if precision.experts_only else precision.bytes) + shape.head * PLAIN
    routed = shape.routed * touched * precision.bytes
    wide: dict[Weights, Weights] = {"w8a8": "int8", "w4a8": "int4"}  # where tokens are in 16 bits
    decoded = wide.get(precision.weights, precision.weights)
    own = decoded if _peak_of_8_bits(devices) is None else precision.weights
    return (dense / WEIGHTS[own] + routed / WEIGHTS[decoded]) / devices.count / devices.chip.bandwidth


def _multiplying(devices: Devices, tokens: int, *, head: int) -> tuple[float, float]:
    """Seconds of the products of so many tokens, at the chip's peak and as prompts have them. Experts and the head take
    tokens in 16 bits."""
    shape, count = devices.shape, devices.count
    dense, others = (2 * tokens * each / count for each in (shape.dense, shape.routed * shape.routed_share + head))
    of_others = others / devices.chip.bf16
    if (peak := _peak_of_8_bits(devices)) is None:
        of_others += dense / devices.chip.bf16
        return of_others, of_others / PROMPTS_BF16
    return dense / peak + of_others, dense / peak / PROMPTS[devices.precision.weights] + of_others / PROMPTS_BF16


def _peak_of_8_bits(devices: Devices) -> float | None:
    """Operations a second, if tokens are brought to 8 bits and multiplied in them. TPUs multiply float8 as bfloat16."""
    match devices.precision.weights:
        case "w8a8":
            return devices.chip.int8
        case "fp8" | "w4a8":
            return devices.chip.fp8 if on_gpu(devices.chip) else None
        case _:
            return None


def _sums(devices: Devices, tokens: int) -> float:
    """The all-reduces: one of the embedding and two in each layer, of an array [tokens, embed], around a ring."""
    count, chip = devices.count, devices.chip
    if count == 1:
        return 0.0
    sums = 2 * devices.shape.layers + 1
    sent = 2 * (count - 1) / count * PLAIN * tokens * devices.shape.embed
    return sums * (sent / chip.ring + _hops(count, chip) * HOP)


def _hops(count: int, chip: Chip) -> int:
    """One after the other, in an all-reduce: there and back, along both sides of a slice that is nearly square."""
    if chip.links == 1:
        return 2  # through a switch
    side = 2 ** int(math.log2(count) / 2)
    return 2 * (side + count // side - 2)
