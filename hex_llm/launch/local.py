"""Engine processes on this machine."""

import os
import signal
import subprocess
from collections.abc import Mapping

import msgspec

from hex_llm.launch.local_devices import local_devices
from hex_llm.launch.task import Task
from hex_llm.process import HUB_SECRETS, start_child


class LocalChild:
    """A process of this machine, a child of this one."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        """A process that is stopped or hangs ends too."""
        self._process.send_signal(signal.SIGKILL)  # which does nothing where it has ended


class LocalLauncher:
    """The launcher of a server on one machine. `folder` is one that nobody else may look into."""

    def __init__(self, folder: str):
        self._folder = folder
        self._num_addresses = 0

    def addresses(self, host: int, number: int) -> list[str]:
        raise AssertionError("on one host a replica is one process, which nobody has to find")

    def pages_address(self, host: int) -> str:
        """None that was given out before: a process that was killed leaves its socket behind."""
        self._num_addresses += 1
        return f"unix:{self._folder}/p{self._num_addresses}"

    def start(self, host: int, task: Task, environment: Mapping[str, str]) -> LocalChild:
        assert host == 0, "there is no other host"
        return start_engine(task, environment)

    def close(self) -> None:
        pass


def start_engine(task: Task, environment: Mapping[str, str]) -> LocalChild:
    """The process of a task, on this machine, with the devices that the task says. It ends with the calling thread."""
    wanted = dict(environment)
    if task.devices is not None or task.num_devices > 1:
        wanted |= local_devices(os.environ).environment(task.devices, os.environ)
    settings = msgspec.json.encode(task).decode()
    return LocalChild(start_child("hex_llm.engine_process", [settings], secrets=HUB_SECRETS, environment=wanted))
