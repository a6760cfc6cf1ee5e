"""How much of the device's memory the KV cache gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hex_llm.errors import OutOfMemory

GIB = 2**30
# The host's memory is shared with everything else, and to touch it all takes time at every start: a CPU "device" takes
# no more than this for its KV cache, unless the longest sequence needs more, and no more than half of what is free.
# --num_blocks overrides it, as on any device.
MAX_CPU_KV = 1 * GIB


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes, on one device."""

    weights: int
    state: int  # what the device remembers of the requests besides their keys and values
    temporaries: int  # of the largest step
    block: int  # one KV block, in all layers
    adapters: int = 0  # of all slots, and one on its way there
    staging: int = 0  # copies of blocks on their way to other engines, or from them

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.state + self.temporaries + self.adapters + self.staging


@dataclass(frozen=True, slots=True)
class Share:
    """How much the KV cache may take: a share of what is free beside the weights, or of the whole device."""

    of_free: float
    of_total: float | None = None  # vLLM's meaning; it wins where it is given


@dataclass(frozen=True, slots=True)
class Memory:
    """Of each device, in bytes: all there are for us, and those in use already."""

    total: int
    used: int
    kv_limit: int | None = None  # of the host's memory: what the KV cache takes at most, but for the longest sequence

    @classmethod
    def of(cls, devices: Sequence[Any]) -> "Memory":  # jax.Device
        """Of the one that has the least left. The devices of a CPU share the host's."""
        stats = [device.memory_stats() for device in devices]
        if all(stats):
            least = min(stats, key=lambda each: each["bytes_limit"] - each["bytes_in_use"])
            return cls(least["bytes_limit"], least["bytes_in_use"])
        free = _free_host_memory() // len(devices)
        return cls(free, 0, min(free // 2, MAX_CPU_KV // len(devices)))


def plan_blocks(
    memory: Memory,
    needs: Needs,
    share: Share,
    *,
    max_model_len: int,
    block_size: int,
    least_blocks: int | None = None,
    most_blocks: int | None = None,
    num_blocks: int | None = None,
) -> int:
    """The number of KV blocks, the null block included. Fails, before anything is allocated, where they do not fit.

    `least_blocks` is what the longest sequence needs, where that is not a block for every `block_size` of its tokens;
    `most_blocks` is what could be used at all; `num_blocks` is taken as it is.
    """
    fixed = needs.fixed
    room = memory.total - memory.used - fixed
    if num_blocks is not None:
        if (num_blocks + 1) * needs.block > room:
            raise OutOfMemory(
                f"--num_blocks={num_blocks} needs {_gib((num_blocks + 1) * needs.block)} for the KV cache; "
                f"{max(room // needs.block - 1, 0)} blocks would fit.\n{_table(memory, needs)}"
            )
        return num_blocks + 1
    wanted = room * share.of_free if share.of_total is None else room - memory.total * (1 - share.of_total)
    least = (least_blocks or -(-max_model_len // block_size)) + 1
    if memory.kv_limit is not None:
        wanted = min(wanted, max(memory.kv_limit, min(least * needs.block, memory.total // 2)))
    blocks = int(max(wanted, 0) // needs.block)
    if memory.kv_limit is not None and blocks > least:
        blocks = max(_rounded(blocks), least)
    if blocks < least:
        fits = max((blocks - 1) * block_size, 0)
        if room < needs.block:
            raise OutOfMemory(
                f"The model needs {_gib(fixed)} beside the KV cache, and {_gib(memory.total - memory.used)} are free: "
                f"only a smaller one fits.\n{_table(memory, needs)}"
            )
        share_flag = "--hbm_utilization_factor" if memory.kv_limit is None else "--num_blocks"
        advice = f"--max_model_len={fits} would fit; so might" if fits else "What may help is"
        raise OutOfMemory(
            f"The KV cache has room for {fits} tokens; --max_model_len={max_model_len} needs more. {advice} a larger "
            f"share by {share_flag}.\n{_table(memory, needs)}"
        )
    return blocks if most_blocks is None else min(blocks, most_blocks + 1)


def less_than_planned(memory: Memory, needs: Needs, num_blocks: int, said: str) -> OutOfMemory:
    """What to say where the device refuses what it should have room for."""
    return OutOfMemory(
        f"The device has less memory than it said: with {_gib(num_blocks * needs.block)} planned for the KV cache it"
        " runs out. Does another process use it? A smaller --hbm_utilization_factor or --num_blocks may fit. It says:"
        f" {said}\n{_table(memory, needs)}"
    )


def _rounded(blocks: int) -> int:
    """Down by a sixteenth at most: what is free on a host is never the same, and steps are compiled for a number of
    blocks, so that the next start should come to the same number to find them.
    """
    unit = 2 ** max(blocks.bit_length() - 5, 0)
    return blocks // unit * unit


def _table(memory: Memory, needs: Needs) -> str:
    rows = {
        "weights": needs.weights,
        "state of the requests": needs.state,
        "temporaries of the largest step": needs.temporaries,
        **({"adapters": needs.adapters} if needs.adapters else {}),
        **({"copies of blocks on their way": needs.staging} if needs.staging else {}),
        "in use before": memory.used,
        "the device has": memory.total,
        "left for the KV cache": memory.total - memory.used - needs.fixed,
        "one KV block": needs.block,
    }
    if memory.kv_limit is not None:
        rows["most of it, on a CPU"] = memory.kv_limit
    return "\n".join(f"  {name:<32}{_gib(size):>14}" for name, size in rows.items())


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 100 else f"{size / 2**20:.2f} MiB"


def _free_host_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OutOfMemory("The system does not tell how much memory is free; give --num_blocks.")
