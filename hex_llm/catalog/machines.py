"""The machines that models are recommended for, and the settings there.

They are those that Hex-LLM's own guides give a model. One that the guides do not name gets the machine of its size by
the rule they state: a chip of 16 GiB for every 16 GB of weights, and no fewer than the next model they name has.
"""

from typing import Any

from hex_llm.catalog.entry import Recommendation

_MAX_SEQS = 256


def v5e(chips: int, *, memory: float = 0.8, length: int = 4096, **more: Any) -> tuple[Recommendation, ...]:
    """TPU v5e, of which a machine has up to 8 chips; 16 are four machines that hold the model together.

    `memory` is the share of what the weights leave that the KV cache takes.
    """
    hosts = 4 if chips == 16 else 1
    return (_machine(f"ct5lp-hightpu-{chips // hosts}t", chips, hosts, memory, length, more),)


def v6e(chips: int, *, memory: float = 0.8, length: int = 4096, **more: Any) -> tuple[Recommendation, ...]:
    """TPU v6e: chips of 32 GiB."""
    return (_machine(f"ct6e-standard-{chips}t", chips, 1, memory, length, more),)


def h200(*, length: int) -> tuple[Recommendation, ...]:
    """The eight GPUs of a machine."""
    return (_machine("a3-ultragpu-8g", 8, 1, 0.9, length, {}),)


def _machine(name: str, devices: int, hosts: int, memory: float, length: int, more: dict[str, Any]) -> Recommendation:
    several = {"num_hosts": hosts} if hosts > 1 else {}
    flags = {"tensor_parallel_size": devices, **several, "hbm_utilization_factor": memory}
    return Recommendation(name, flags | {"max_decode_seqs": _MAX_SEQS, "max_model_len": length} | more)
