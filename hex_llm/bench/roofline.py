"""How fast a step can be at most: what a device has to compute, to read and to send, over what its chip can do.

A step is made of parts that follow each other, as in the compiled programs, which send while they do nothing else. Each
takes as long as the slowest of its three: computing, reading memory, sending to other devices. Nothing is counted for
what real steps also do: activations in memory, norms, the host. So no such step is faster; how much slower it is, only
running it can tell.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hex_llm.catalog.chips import Chip
from hex_llm.models.arch import Arch
from hex_llm.models.registry import family
from hex_llm.models.split import Split
from hex_llm.models.weights import WeightSpec, specs
from hex_llm.parallel.sharding import RULES

ITEM = 2  # bytes of a bf16
HOP = 1e-6  # seconds from a chip to the next one, about


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a sequence that a step computes."""

    tokens: int
    context: int  # tokens of the sequence with these


@dataclass(frozen=True, slots=True)
class Part:
    """Of one device."""

    name: str
    flops: float = 0.0
    read: float = 0.0  # bytes of memory
    sent: float = 0.0  # bytes
    hops: int = 0

    def seconds(self, chip: Chip) -> float:
        return max(self.flops / chip.bf16, self.read / chip.bandwidth, self.sent / chip.ring) + self.hops * HOP


@dataclass(frozen=True, slots=True)
class Machine:
    chip: Chip
    shape: tuple[int, ...]  # of the chips: (2, 4)

    @property
    def devices(self) -> int:
        return math.prod(self.shape)

    @property
    def hops(self) -> int:
        """One after the other, in an all-reduce: along each axis there and back."""
        return 2 * sum(size - 1 for size in self.shape)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of a device's share of the weights."""

    dense: int
    experts: int
    head: int


def step_seconds(arch: Arch, machine: Machine, slices: Sequence[Slice], *, bits: float = 16) -> float:
    return sum(part.seconds(machine.chip) for part in step_parts(arch, machine, slices, bits=bits))


def step_parts(arch: Arch, machine: Machine, slices: Sequence[Slice], *, bits: float = 16) -> list[Part]:
    """What a device does in a step whose tokens are chosen greedily. `bits`: of a weight in memory, with its part of a
    scale; the head is in bf16 always.
    """
    split, sizes = Split(arch, machine.devices), weight_sizes(arch, machine.devices)
    tokens, rows = sum(each.tokens for each in slices), len(slices)
    parts = [
        Part("products", flops=2 * sizes.dense * tokens, read=bits / 8 * sizes.dense),
        _attention(arch, split, slices),
        Part("head", flops=2 * sizes.head * rows, read=ITEM * sizes.head),
    ]
    if arch.num_experts:
        share = arch.experts_per_token / arch.num_experts
        touched = 1 - (1 - share) ** tokens  # of the experts, if they are chosen alike
        read = bits / 8 * sizes.experts * touched
        parts.append(Part("experts", flops=2 * sizes.experts * share * tokens, read=read))
    if machine.devices > 1:
        parts.append(sums(arch, machine, tokens))
    return parts


def sums(arch: Arch, machine: Machine, tokens: int) -> Part:
    """The all-reduces: one of the embedding, and two in each layer, of the stream's [tokens, embed]."""
    count = 2 * arch.num_layers + 1
    whole = ITEM * tokens * arch.embed_size
    share = (machine.devices - 1) / machine.devices
    return Part("sums", sent=count * 2 * share * whole, hops=count * machine.hops)


def _attention(arch: Arch, split: Split, slices: Sequence[Slice]) -> Part:
    flops = read = 0.0
    for kind in arch.kinds:
        for each in slices:
            first = each.context - each.tokens  # a token sees those before it, and on average half of the slice
            seen, kept = first + (each.tokens + 1) / 2, each.context
            if kind.window is not None:
                seen, kept = min(seen, kind.window.size), min(kept, kind.window.size + each.tokens)
            flops += 4 * split.heads * arch.head_dim * each.tokens * seen
            read += ITEM * 2 * split.kv_heads * arch.head_dim * kept
    return Part("attention", flops=flops, read=read)


def weight_sizes(arch: Arch, devices: int) -> Sizes:
    split = Split(arch, devices)

    def size(spec: WeightSpec) -> int:
        shared = any(RULES[dim] for dim in spec.dims)
        return math.prod(spec.shape(split)) // (devices if shared else 1)

    every = specs(family(arch).weights, arch)
    # The embedding is looked up, not read; where the head is the same array, it is read as that.
    head = [size(spec) for spec in every if "vocab" in spec.dims]
    return Sizes(
        dense=sum(size(spec) for spec in every if "vocab" not in spec.dims and not spec.stack),
        experts=sum(size(spec) for spec in every if spec.stack),
        head=max(head),
    )


@dataclass(frozen=True, slots=True)
class Served:
    """Of a load that keeps so many requests running."""

    tokens_per_second: float  # of output
    seconds_per_token: float  # of a request


def served(arch: Arch, machine: Machine, *, running: int, prompt: int, output: int, bits: float = 16) -> Served:
    """While all are answered once, there are `output` decode steps of all, with as many prompts as there are requests
    between them, or in them."""
    decode = step_seconds(arch, machine, [Slice(1, prompt + output // 2)] * running, bits=bits)
    prefill = step_seconds(arch, machine, [Slice(prompt, prompt)], bits=bits)
    seconds = output * decode + running * prefill
    return Served(running * output / seconds, seconds / output)
