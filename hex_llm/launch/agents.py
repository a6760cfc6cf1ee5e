"""Processes on other hosts: each of them runs an agent, which host 0 tells what to start.

The hosts come in any order. Until all of them have come, what host 0 wants to start waits; from then on a host that is
lost takes its processes along, and may come back.
"""

import logging
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from hex_llm import channel
from hex_llm.errors import ConfigError, PortError, StartError
from hex_llm.frames import Broken
from hex_llm.launch.addresses import Place
from hex_llm.launch.agent_wire import End, Exited, HostHello, Start, Stop, difference
from hex_llm.launch.launcher import Child
from hex_llm.launch.local import start_engine
from hex_llm.launch.task import Task
from hex_llm.peer import Peer
from hex_llm.process import CLUSTER_KEY, ENGINE_DIED

logger = logging.getLogger(__name__)

GATHER_S = 600.0  # that the hosts have to come
_SAY_FIRST_S, _SAY_S = 3.0, 30.0  # when, and then how often, those that are missing are named
_RETRY_S = 0.2  # where no connection can be accepted
_STOP_S = 2.0  # that agents have to end in when they are told to


@dataclass(slots=True, eq=False)
class _Host:
    """Another host whose agent is connected, and the processes there that have not ended, by number."""

    hello: HostHello
    peer: Peer[Exited]
    children: "dict[int, HostChild]" = field(default_factory=dict)


class HostChild:
    """A process on any of the hosts, which may have yet to begin."""

    def __init__(self, agents: "Agents", host: int, task: Task, environment: Mapping[str, str], number: int):
        self.host = host
        self.task = task
        self.environment = environment
        self.number = number
        self.exit_code: int | None = None
        self.local: Child | None = None  # where it runs on this host
        self.is_begun = False
        self._agents = agents

    def poll(self) -> int | None:
        if not self.is_begun and self.exit_code is None:
            self._agents.begin(self)
        if self.local is not None and self.exit_code is None:
            self.exit_code = self.local.poll()
        return self.exit_code

    def end(self) -> None:
        if self.local is not None:
            self.local.end()
        self._agents.end(self)


class Agents:
    """The launcher of host 0. What it is asked to start is started by whoever polls, when all hosts have come."""

    def __init__(self, place: Place, hello: HostHello, key: bytes, *, gather: float = GATHER_S):
        """`hello` is what an agent on this host would say."""
        self._place = place
        self._own = hello
        self._key = key
        self._lock = threading.RLock()
        self._hosts: dict[int, _Host] = {}
        self._problem: StartError | None = None
        self._gathered = False
        self._closing = False
        self._deadline = time.monotonic() + gather
        self._gather = gather
        self._say_at = time.monotonic() + _SAY_FIRST_S
        self._num_started = 0
        self._ports: dict[HostChild, set[int]] = {}  # that are taken
        try:
            self._listener = channel.listen(f"tcp:{place.coordinator}")
        except OSError as error:
            raise PortError(
                f"Host 0 cannot listen on {place.coordinator}, where the other hosts look for it: {error.strerror}."
            ) from None
        threading.Thread(target=self._accept, daemon=True, name="accept agents").start()

    def addresses(self, host: int, number: int) -> list[str]:
        """The lowest ports above the coordinator's that none of the processes has. A host that has not come yet has no
        address; what stands for it is replaced when it has."""
        with self._lock:
            self._check_host(host)
            self._ports = {child: ports for child, ports in self._ports.items() if child.exit_code is None}
            taken = {port for ports in self._ports.values() for port in ports}
            ports: list[int] = []
            port = self._place.coordinator.port
            while len(ports) < number:
                port += 1
                if port not in taken:
                    ports.append(port)
            return [f"{_token(host)}:{port}" for port in ports]

    def pages_address(self, host: int) -> str:
        (address,) = self.addresses(host, 1)
        return f"tcp:{address}"

    def start(self, host: int, task: Task, environment: Mapping[str, str]) -> HostChild:
        with self._lock:
            self._check_host(host)
            self._num_started += 1
            child = HostChild(self, host, task, environment, self._num_started)
            addresses = (task.steps, task.coordinator, *(engine.pages for engine in task.engines))
            self._ports[child] = {int(each.rpartition(":")[2]) for each in addresses if each}
            return child

    def close(self) -> None:
        with self._lock:
            self._closing = True
            hosts = list(self._hosts.values())
            channel.stop_listening(self._listener)
        for host in hosts:
            host.peer.send(Stop())
        for host in hosts:
            host.peer.wait_for_end(_STOP_S)
            host.peer.close()

    def begin(self, child: HostChild) -> None:
        """Starts it if all hosts are there. For the main thread: a process here ends with the thread that began it."""
        with self._lock:
            if not self._all_there():
                if self._problem is not None:
                    child.exit_code = self._problem.exit_code
                return
            child.is_begun = True
            task = self._with_addresses(child.task)
            if child.host == 0:
                child.local = start_engine(task, child.environment)
                return
            host = self._hosts.get(child.host)
            if host is None:
                child.exit_code = ENGINE_DIED
                return
            host.children[child.number] = child
        # Every host has the key itself; it is not sent.
        environment = {name: value for name, value in child.environment.items() if name != CLUSTER_KEY}
        host.peer.send(Start(child.number, task, environment))

    def end(self, child: HostChild) -> None:
        """Tells the host that has it; one that has not begun has ended."""
        with self._lock:
            host = self._hosts.get(child.host)
            if not child.is_begun and child.exit_code is None:
                child.exit_code = -signal.SIGKILL
            is_there = host is not None and child.number in host.children
        if host is not None and is_there:
            host.peer.send(End(child.number))

    def _all_there(self) -> bool:
        if self._gathered or self._problem is not None:
            return self._problem is None
        missing = sorted(set(range(1, self._place.num_hosts)) - self._hosts.keys())
        if not missing:
            self._gathered = True
            logger.info("All %d hosts are there.", self._place.num_hosts)
            return True
        now, names = time.monotonic(), ", ".join(map(str, missing))
        if now > self._deadline:
            self._problem = StartError(
                f"Of --num_hosts={self._place.num_hosts}, host {names} has not connected to"
                f" {self._place.coordinator} within {self._gather:g} s."
            )
            logger.critical("%s", self._problem)
        elif now > self._say_at:
            self._say_at = now + _SAY_S
            logger.info("Waiting at %s for host %s.", self._place.coordinator, names)
        return False

    def _check_host(self, host: int) -> None:
        if self._gathered and host and host not in self._hosts:
            raise StartError(f"host {host} is not connected")

    def _with_addresses(self, task: Task) -> Task:
        hosts = {0: self._own.address} | {rank: host.hello.address for rank, host in self._hosts.items()}

        def known(text: str) -> str:
            for rank, address in hosts.items():
                text = text.replace(_token(rank), f"[{address}]" if ":" in address else address)
            return text

        engines = tuple(msgspec.structs.replace(each, pages=known(each.pages)) for each in task.engines)
        return msgspec.structs.replace(
            task, engines=engines, steps=known(task.steps), coordinator=known(task.coordinator)
        )

    def _accept(self) -> None:
        while True:
            try:
                connection, (where, *_) = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:  # closed
                    return
                time.sleep(_RETRY_S)  # too many files are open, for one
                continue
            threading.Thread(target=self._greet, args=(connection, where), daemon=True, name="greet").start()

    def _greet(self, connection: socket.socket, where: str) -> None:
        try:
            found = channel.greet(connection, self._key)
            hello = found.receive(HostHello, timeout=channel.GREET_S)
        except (OSError, Broken) as error:
            logger.error("A connection from %s is refused: %s", where, error)
            return
        if reason := self._refusal(hello):
            text = f"Host {hello.rank} at {hello.address} cannot take part: {reason}."
            with self._lock:
                if not self._gathered:
                    self._problem = self._problem or ConfigError(text)
            logger.error("%s", text)
            found.send(Stop(text))
            found.socket.close()
            return
        with self._lock:
            self._hosts[hello.rank] = host = _Host(
                hello,
                Peer(
                    found,
                    Exited,
                    take=lambda message: self._exited(hello.rank, message),
                    lost=lambda why: self._lose(host, why),
                ),
            )
        logger.info("Host %d is there, at %s.", hello.rank, hello.address)

    def _refusal(self, hello: HostHello) -> str | None:
        with self._lock:
            if not 0 < hello.rank < self._place.num_hosts:
                return f"its rank is not between 1 and {self._place.num_hosts - 1}"
            if hello.rank in self._hosts:
                return f"there is one of that rank at {self._hosts[hello.rank].hello.address}"
        return difference(hello, self._own)

    def _exited(self, rank: int, message: Exited) -> None:
        with self._lock:
            host = self._hosts.get(rank)
            child = host and host.children.pop(message.number, None)
            if child:
                child.exit_code = message.exit_code

    def _lose(self, host: _Host, why: str) -> None:
        with self._lock:
            if not self._closing:
                logger.error("Host %d at %s is lost: %s.", host.hello.rank, host.hello.address, why)
            del self._hosts[host.hello.rank]
            for child in host.children.values():
                child.exit_code = ENGINE_DIED
            host.children.clear()


def _token(host: int) -> str:
    """Stands for a host's address until that is known."""
    return f"<host {host}>"
