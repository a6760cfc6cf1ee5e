"""What a process of an engine is told when it is started."""

import msgspec

from hex_llm.config import Config


class EngineTask(msgspec.Struct, frozen=True):
    """One engine of a process."""

    config: Config
    replica: int = 0
    devices: tuple[int, ...] | None = None  # of those that the process sees, by number; None: the first ones
    pages: str = ""  # where it listens for engines that fetch blocks; empty where none does


class Task(msgspec.Struct, frozen=True):
    """One host's part of one replica, or several engines as a whole. Addresses are `unix:PATH` or `tcp:HOST:PORT`."""

    engines: tuple[EngineTask, ...]
    fronts: tuple[str, ...]  # where the HTTP processes listen for engines; rank 0 connects to all of them
    rank: int = 0  # among the hosts of the replica: 0 schedules, the others follow it
    num_ranks: int = 1
    num_devices: int = 1  # that this process brings; each host of a replica brings as many
    devices: tuple[int, ...] | None = None  # of its host's, by number, all that it shall see; None: whatever is there
    steps: str = ""  # where rank 0 listens for those that follow; empty where there are none
    coordinator: str = ""  # HOST:PORT of the coordinator of jax.distributed; empty where there is one host
