"""What host 0 and the agents on the other hosts say to each other."""

import msgspec

from hex_llm.config import Config
from hex_llm.launch.task import Task

# What may differ: a host can know it from its environment.
_OWN_FLAGS = ("host_rank", "coordinator_address")


class HostHello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An agent's first word: which host this is, and what has to be the same on all."""

    rank: int
    address: str  # of the host, for the other hosts
    config: Config
    platform: str
    num_devices: int
    versions: str


class Exited(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A process that was started there has ended."""

    number: int
    exit_code: int


class Start(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The numbers are host 0's, which knows the process by it."""

    number: int
    task: Task
    environment: dict[str, str]


class End(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The process is ended at once."""

    number: int


class Stop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The server has ended; with a reason, it is one that this host cannot be a part of."""

    reason: str = ""


type FromAgent = HostHello | Exited
type ToAgent = Start | End | Stop


def difference(host: HostHello, first: HostHello) -> str | None:
    """What is not the same on a host as on host 0, where anything is."""
    if host.versions != first.versions:
        return f"it has {host.versions}, and host 0 has {first.versions}"
    if (host.platform, host.num_devices) != (first.platform, first.num_devices):
        return (
            f"it has {host.num_devices} {host.platform} devices, and host 0 has {first.num_devices}"
            f" {first.platform} devices"
        )
    ours, theirs = first.config.of_engine(), host.config.of_engine()
    for name in ours:
        if name not in _OWN_FLAGS and ours[name] != theirs[name]:
            return f"it was started with --{name}={theirs[name]}, and host 0 with --{name}={ours[name]}"
    return None
