"""How processes of engines come to be, on this machine or on others."""

from collections.abc import Mapping
from typing import Protocol

from hex_llm.launch.task import Task


class Child(Protocol):
    """A process that was started, wherever it runs."""

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        ...

    def end(self) -> None:
        """Has it end at once, however it is, without waiting for it: `poll` says when it has."""
        ...


class Launcher(Protocol):
    """Starts processes on hosts, which are numbered from 0, this machine."""

    def addresses(self, host: int, number: int) -> list[str]:
        """So many free `HOST:PORT` of a host, which the other hosts can reach."""
        ...

    def pages_address(self, host: int) -> str:
        """A free address on a host, at which an engine there can be asked for blocks by all others. With port 0 it is
        the engine that says which one it has.
        """
        ...

    def start(self, host: int, task: Task, environment: Mapping[str, str]) -> Child:
        """Runs `hex_llm.engine_process` with the task there; the environment is added to the host's own."""
        ...

    def close(self) -> None:
        """Ends what is left, and the connections to other hosts."""
        ...
