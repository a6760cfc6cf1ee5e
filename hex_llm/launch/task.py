"""What a process of an engine is told when it is started."""

import msgspec

from hex_llm.config import Config


class Task(msgspec.Struct, frozen=True):
    """One host's part of one replica. Addresses are `unix:PATH` or `tcp:HOST:PORT`."""

    config: Config
    fronts: tuple[str, ...]  # where the HTTP processes listen for engines; rank 0 connects to all of them
    replica: int = 0
    rank: int = 0  # among the hosts of the replica: 0 schedules, the others follow it
    num_ranks: int = 1
    num_devices: int = 1  # that this process brings to the replica; each of its hosts brings as many
    devices: tuple[int, ...] | None = None  # of its host's, by number, all that it shall see; None: whatever is there
    steps: str = ""  # where rank 0 listens for those that follow; empty where there are none
    coordinator: str = ""  # HOST:PORT of the coordinator of jax.distributed; empty where there is one host
    pages: str = ""  # where it listens for engines that fetch blocks; empty where none does
