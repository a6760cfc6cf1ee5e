"""How fast a model answers on some devices: a roofline, with the shares of it that were measured."""

import math
from dataclasses import dataclass

from hex_llm.catalog.chips import Chip
from hex_llm.planning.efficiency import CACHE, EXPOSED, HOP, LAYER, PROMPTS_8_BITS, PROMPTS_BF16, WEIGHTS
from hex_llm.planning.memory import kv_bytes_per_token
from hex_llm.planning.precision import PLAIN, Precision
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
    multiplied = 2 * sequences * (shape.dense + shape.routed * shape.routed_share + shape.head)
    peak, share = _peak(devices)
    multiplying = multiplied / count / peak
    seen = sum(min(context, window or context) for window in shape.windows) / shape.layers
    cache = kv_bytes_per_token(shape, precision, count) * seen * sequences
    return (
        # Many sequences are as bound to multiplying as prompts are.
        max(_reading(devices, sequences) + EXPOSED * multiplying, multiplying / share)
        + cache / (chip.bandwidth * CACHE[precision.cache])
        + shape.layers * LAYER
        + _sums(devices, sequences)
    )


def prefill_seconds(devices: Devices, tokens: int) -> float:
    """A prompt by itself."""
    shape, count = devices.shape, devices.count
    products = 2 * tokens * (shape.dense + shape.routed * shape.routed_share)
    # A token sees those before it: half of the prompt on average, or its window.
    seen = sum(min(tokens / 2, window or tokens) for window in shape.windows)
    attention = 4 * shape.heads * shape.head_dim * tokens * seen
    peak, share = _peak(devices)
    multiplying = products / (peak * share) + attention / (devices.chip.bf16 * PROMPTS_BF16)
    # The weights are read at least once.
    return max(multiplying / count, _reading(devices, tokens)) + shape.layers * LAYER + _sums(devices, tokens)


def _reading(devices: Devices, tokens: int) -> float:
    """Seconds in which the weights are read that so many tokens need. Experts are taken to be chosen alike."""
    shape, precision = devices.shape, devices.precision
    touched = 1 - (1 - shape.routed_share) ** tokens
    dense = PLAIN if precision.experts_only else precision.bytes
    read = shape.dense * dense + shape.routed * touched * precision.bytes + shape.head * PLAIN
    return read / devices.count / (devices.chip.bandwidth * WEIGHTS[precision.weights])


def _peak(devices: Devices) -> tuple[float, float]:
    """Operations a second of products, and the share of them that prompts reach."""
    in_8_bits = {"fp8": devices.chip.fp8, "w8a8": devices.chip.int8}.get(devices.precision.weights)
    if in_8_bits is not None:
        return in_8_bits, PROMPTS_8_BITS
    return devices.chip.bf16, PROMPTS_BF16


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
