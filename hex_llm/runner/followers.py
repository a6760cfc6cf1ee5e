"""A replica of several hosts: the host of rank 0 schedules and says each step, the others do the same and know nothing.

A host that is lost, or that cannot start, is the end of the whole replica: the others would wait for it within a step,
where nothing can reach them, so that the process is ended from the thread that watches.
"""

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import sleep
from typing import Protocol

from hex_llm import channel
from hex_llm.errors import ConfigError, PortError, StartError
from hex_llm.frames import Broken
from hex_llm.peer import SILENCE_S, Peer
from hex_llm.process import ENGINE_DIED
from hex_llm.runner.packed_step import PackedStep
from hex_llm.runner.step_wire import End, Failed, Joined, Step, ToFollower, versions

JOIN_S = 300.0  # that the hosts of a replica have to find each other, once their processes run
_END_S = 2.0  # that hosts have to end when they are told to
_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Replica:
    """Which replica, of how many hosts, and how its hosts meet."""

    index: int
    num_hosts: int
    address: str  # tcp:HOST:PORT, where rank 0 listens
    key: bytes


class Followers:
    """The hosts that follow, as rank 0 sees them."""

    def __init__(self, replica: Replica, *, failed: Callable[[int], None], silence: float = SILENCE_S):
        """Listens for them. Before the process ends because one could not start, `failed` is called with the code."""
        self._replica = replica
        self._failed = failed
        self._silence = silence
        self._peers: dict[int, Peer[Failed]] = {}
        self._problem: str | None = None
        self._ending = False
        self._changed = threading.Condition()
        try:
            self._listener = channel.listen(replica.address)
        except OSError as error:
            raise PortError(
                f"Replica {replica.index} cannot listen for its other hosts on {replica.address}: {error.strerror}."
            ) from None
        threading.Thread(target=self._accept, daemon=True, name="accept followers").start()

    def wait(self, timeout: float) -> None:
        """Until all are connected."""
        everybody = set(range(1, self._replica.num_hosts))
        with self._changed:
            self._changed.wait_for(lambda: self._problem or self._peers.keys() == everybody, timeout)
            if self._problem is not None:
                raise ConfigError(self._problem)
            if missing := sorted(everybody - self._peers.keys()):
                raise StartError(
                    f"Of the {self._replica.num_hosts} hosts of replica {self._replica.index}, those of rank"
                    f" {', '.join(map(str, missing))} have not connected to {self._replica.address} within"
                    f" {timeout:g} s."
                )
        channel.stop_listening(self._listener)

    def send(self, packed: PackedStep) -> None:
        """Has every host run the step, beside this one."""
        step = Step.of(packed)
        for peer in self._peers.values():
            peer.send(step)

    def end(self) -> None:
        """The others end, too, and nobody takes it for a loss."""
        self._ending = True
        for peer in self._peers.values():
            peer.send(End())
        for peer in self._peers.values():
            peer.wait_for_end(_END_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:  # everybody is there
                    return
                sleep(_RETRY_S)  # too many files are open, for one
                continue
            threading.Thread(target=self._greet, args=(connection,), daemon=True, name="greet").start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            found = channel.greet(connection, self._replica.key)
            joined = found.receive(Joined, timeout=channel.GREET_S)
        except (OSError, Broken):
            return  # somebody else; a host that is missing is missed by `wait`
        with self._changed:
            if not 0 < joined.rank < self._replica.num_hosts or joined.rank in self._peers:
                found.socket.close()
                return
            peer = self._peers[joined.rank] = Peer(
                found,
                Failed,
                take=lambda message: self._fail(joined.rank, message),
                lost=lambda why: self._lose(joined.rank, why),
                silence=self._silence,
            )
            if joined.versions != versions():
                self._problem = (
                    f"Host {joined.rank} of replica {self._replica.index} at {peer.address} has {joined.versions}, and"
                    f" host 0 has {versions()}; all hosts need the same."
                )
            self._changed.notify_all()

    def _fail(self, rank: int, message: Failed) -> None:
        self._say_of(rank, message.reason)
        if message.exit_code != ENGINE_DIED:
            self._failed(message.exit_code)
        os._exit(message.exit_code)

    def _lose(self, rank: int, why: str) -> None:
        if not self._ending:
            self._say_of(rank, f"is lost: {why}.")
            os._exit(ENGINE_DIED)

    def _say_of(self, rank: int, what: str) -> None:
        with self._changed:
            address = self._peers[rank].address
        _say(f"host {rank} of replica {self._replica.index} at {address} {what}")


class Leader:
    """The host of rank 0, as one that follows sees it."""

    def __init__(self, replica: Replica, rank: int, *, timeout: float, silence: float = SILENCE_S):
        """Connects to it; it may not be there yet."""
        self._replica = replica
        self._inbox: queue.SimpleQueue[Step] = queue.SimpleQueue()
        found = _call(replica, timeout)
        found.send(Joined(rank, versions()))
        self._peer: Peer[ToFollower] = Peer(found, Step | End, take=self._take, lost=self._lose, silence=silence)

    def __iter__(self) -> Iterator[PackedStep]:
        """The steps as they come. There is no end to them but that of the process."""
        while True:
            yield self._inbox.get().packed()

    def fail(self, reason: str, exit_code: int) -> None:
        """Tells what became of this host, in words that can follow its name, and waits for the other to end."""
        self._peer.send(Failed(reason, exit_code))
        self._peer.wait_for_end(_END_S)

    def _take(self, message: ToFollower) -> None:
        match message:
            case Step():
                self._inbox.put(message)
            case End():
                os._exit(0)

    def _lose(self, why: str) -> None:
        # Not the peer's address: this may be called before the peer is there.
        where = self._replica.address.removeprefix("tcp:")
        _say(f"host 0 of replica {self._replica.index} at {where} is lost: {why}.")
        os._exit(ENGINE_DIED)


class Runs(Protocol):
    def run(self, packed: PackedStep, /) -> object: ...


def follow(leader: Leader, runner: Runs) -> None:
    """Runs what the leader says, for as long as it is there. What comes of a step is the leader's to read."""
    for packed in leader:
        runner.run(packed)


def _call(replica: Replica, timeout: float) -> channel.Channel:
    try:
        return channel.keep_calling(replica.address, replica.key, timeout)
    except Broken as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise StartError(
            f"Host 0 of replica {replica.index} cannot be reached at {replica.address} for {timeout:g} s: {error}."
        ) from None


def _say(text: str) -> None:
    """One line, and at once: the process ends after it."""
    print(f"hex-llm: {text}", file=sys.stderr, flush=True)
