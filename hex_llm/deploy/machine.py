"""What a type of machine has, as Google Cloud sells them: its accelerators, and what others call these.

Machines and topologies of v5e are those of cloud.google.com/tpu/docs/v5e, and Vertex AI's names of GPUs those of its
SDK, with which a test compares them. The others were not compared with a page line by line; they would be found in
cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and cloud.google.com/compute/docs/gpus.
"""

import math
import re
from dataclasses import dataclass

from hex_llm.errors import ConfigError
from hex_llm.launch.local_devices import Platform

# Of so many chips, in how many rows, columns and layers they lie. v5e and v6e are flat.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_DEEP = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
_CHIPS_OF_SEVERAL_HOSTS = 4  # of each machine, where several make a slice


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    platform: Platform
    devices: int = 0
    gke: str = ""  # the accelerator, as nodes of GKE are labelled
    vertex: str = ""  # the same, as Vertex AI calls it; TPUs come with the machine's type

    def topology(self, hosts: int) -> str:
        """How the chips of so many TPU hosts lie; ConfigError where there is no such slice."""
        several = hosts > 1 and self.devices != _CHIPS_OF_SEVERAL_HOSTS
        shapes = _DEEP if self.gke in ("tpu-v4-podslice", "tpu-v5p-slice") else _FLAT
        if several or self.devices * hosts not in shapes:
            raise ConfigError(f"There is no slice of {hosts} machines {self.name}.")
        return shapes[self.devices * hosts]

    def check_topology(self, topology: str, hosts: int) -> None:
        """Raises ConfigError unless the chips of so many hosts can lie so."""
        if not re.fullmatch(r"\d+x\d+(x\d+)?", topology):
            raise ConfigError(f"--tpu_topology={topology} is not of the form 4x4 or 2x2x4.")
        chips = math.prod(map(int, topology.split("x")))
        if self.platform != "tpu" or chips != self.devices * hosts:
            raise ConfigError(
                f"--tpu_topology={topology} is of {chips} chips; {hosts} of {self.name} (--num_hosts={hosts}) have"
                f" {self.devices * hosts if self.platform == 'tpu' else 0}."
            )


def _tpus(prefix: str, sizes: tuple[int, ...], gke: str) -> list[Machine]:
    return [Machine(f"{prefix}-{chips}t", "tpu", chips, gke) for chips in sizes]


def _gpus(prefix: str, sizes: tuple[int, ...], gke: str, vertex: str) -> list[Machine]:
    return [Machine(f"{prefix}-{gpus}g", "cuda", gpus, gke, vertex) for gpus in sizes]


_L4 = {4: 1, 8: 1, 12: 1, 16: 1, 32: 1, 24: 2, 48: 4, 96: 8}  # GPUs by the number of CPUs, which is in the name

KNOWN = {
    machine.name: machine
    for machine in (
        *_tpus("ct4p-hightpu", (4,), "tpu-v4-podslice"),
        *_tpus("ct5lp-hightpu", (1, 4, 8), "tpu-v5-lite-podslice"),
        *_tpus("ct5p-hightpu", (4,), "tpu-v5p-slice"),
        *_tpus("ct6e-standard", (1, 4, 8), "tpu-v6e-slice"),
        *_gpus("a2-highgpu", (1, 2, 4, 8), "nvidia-tesla-a100", "NVIDIA_TESLA_A100"),
        *_gpus("a2-ultragpu", (1, 2, 4, 8), "nvidia-a100-80gb", "NVIDIA_A100_80GB"),
        *_gpus("a3-highgpu", (1, 2, 4, 8), "nvidia-h100-80gb", "NVIDIA_H100_80GB"),
        *_gpus("a3-ultragpu", (8,), "nvidia-h200-141gb", "NVIDIA_H200_141GB"),
        *(Machine(f"g2-standard-{cpus}", "cuda", gpus, "nvidia-l4", "NVIDIA_L4") for cpus, gpus in _L4.items()),
    )
}


def find_machine(name: str) -> Machine:
    """The machine of that type. One of a series that has no accelerators is for the CPU."""
    if name in KNOWN:
        return KNOWN[name]
    if re.fullmatch(r"(c2|c2d|c3|c3d|c4|c4a|c4d|e2|n2|n2d|n4)-[a-z]+-[0-9a-z-]+", name):
        return Machine(name, "cpu")
    raise ConfigError(f"--machine_type={name} is none that is known. With accelerators there are {', '.join(KNOWN)}.")
