"""Hosts for tests: where Linux lets us, each with an address and a name of its own; else all of them are this one."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    address: str
    enter: tuple[str, ...] = ()  # what a command for it begins with


@contextlib.contextmanager
def machines(number: int) -> Iterator[list[Machine]]:
    """So many hosts, connected by a bridge that stands in the network of the first."""
    with contextlib.ExitStack() as stack:
        found = None
        if all(map(shutil.which, ("unshare", "nsenter", "ip", "hostname"))):
            with contextlib.suppress(subprocess.CalledProcessError, OSError):
                found = _namespaces(stack, number)
        yield found or [Machine("127.0.0.1")] * number


def _namespaces(stack: contextlib.ExitStack, number: int) -> list[Machine]:
    pids: list[int] = []
    for index in range(number):
        # The later ones are made within the first, which has the right to connect them.
        first = ["unshare", "--user", "--map-root-user", "--net", "--uts"] if not index else []
        later = [*_enter(pids[0]), "unshare", "--net", "--uts"] if index else []
        command = [*first, *later, "sh", "-c", f"hostname 10.77.0.{index + 1} && echo up && exec sleep 600"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            raise OSError("no namespace")
        pids.append(process.pid)

    def on(index: int, line: str) -> None:
        subprocess.run([*_enter(pids[index]), "ip", *line.split()], check=True, capture_output=True)

    on(0, "link add hosts type bridge")
    on(0, "link set hosts up")
    on(0, "addr add 10.77.0.1/24 dev hosts")
    for index in range(number):
        on(index, "link set lo up")
        if index:
            on(0, f"link add host{index} type veth peer name net netns {pids[index]}")
            on(0, f"link set host{index} master hosts up")
            on(index, f"addr add 10.77.0.{index + 1}/24 dev net")
            on(index, "link set net up")
    return [Machine(f"10.77.0.{index + 1}", tuple(_enter(pid))) for index, pid in enumerate(pids)]


def _enter(pid: int) -> Sequence[str]:
    return ["nsenter", f"--target={pid}", "--user", "--net", "--uts", "--preserve-credentials"]
