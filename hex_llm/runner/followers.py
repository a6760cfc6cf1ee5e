"""A replica of several hosts: the host of rank 0 schedules and says each step, the others do the same and know nothing.

Of adapters they get the numbers themselves, and each only those of its own devices: a host that read the files could
find others than rank 0 did, or none. The numbers go ahead of their use, in parts between the steps, and stay with the
others for as long as rank 0 has them; to load them is then one word more, in order with the steps.

A host that is lost, or that cannot start, is the end of the whole replica: the others would wait for it within a step,
where nothing can reach them, so that the process is ended from the thread that watches.
"""

import itertools
import os
import queue
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import sleep
from typing import Protocol

import numpy as np

from hex_llm import channel
from hex_llm.errors import ConfigError, PortError, StartError
from hex_llm.frames import Broken
from hex_llm.peer import SILENCE_S, Peer
from hex_llm.process import ENGINE_DIED
from hex_llm.runner.packed_adapter import PackedAdapter
from hex_llm.runner.packed_step import PackedStep
from hex_llm.runner.step_wire import (
    AdapterPart,
    End,
    Failed,
    Forget,
    Joined,
    Load,
    Order,
    Step,
    ToFollower,
    versions,
)

JOIN_S = 300.0  # that the hosts of a replica have to find each other, once their processes run
_END_S = 2.0  # that hosts have to end when they are told to
_RETRY_S = 0.2
_PART = 2**18  # bytes of an adapter in a message: a step waits for no more than one


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
        self._sharing = threading.Lock()
        self._between_steps = threading.Event()
        self._between_steps.set()
        self._numbers = itertools.count(1)
        self._gone: queue.SimpleQueue[int] = queue.SimpleQueue()  # adapters that nobody here has any more
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
        self._order(Step.of(packed))

    def share(self, rows: Mapping[int, np.ndarray]) -> PackedAdapter:
        """Gives every host its rows of an adapter, which are told by its rank, and returns this one's. From any thread;
        it takes its time, and steps pass it."""
        with self._sharing:
            self._forget()
            adapter = PackedAdapter(rows[0], next(self._numbers))
            weakref.finalize(adapter, self._gone.put, adapter.number)
            for rank, peer in self._peers.items():
                data = rows[rank].reshape(-1).view(np.uint8)
                for start in range(0, data.size, _PART):
                    part = AdapterPart(adapter.number, data[start : start + _PART].tobytes())
                    self._between_steps.wait()  # a lock alone lets whoever has just had it have it again
                    peer.send(part)
        return adapter

    def load(self, slot: int, adapter: PackedAdapter) -> None:
        """Has every host write its rows of an adapter to a slot, after the steps so far."""
        self._order(Load(adapter.number, slot))

    def end(self) -> None:
        """The others end, too, and nobody takes it for a loss."""
        self._ending = True
        for peer in self._peers.values():
            peer.send(End())
        for peer in self._peers.values():
            peer.wait_for_end(_END_S)

    def _order(self, order: Step | Load) -> None:
        self._between_steps.clear()
        for peer in self._peers.values():
            peer.send(order)
        self._between_steps.set()

    def _forget(self) -> None:
        """Not at once when an adapter goes: whoever lets go of it may be in the middle of sending."""
        while not self._gone.empty():
            gone = Forget(self._gone.get())
            for peer in self._peers.values():
                peer.send(gone)

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
        self._inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
        found = _call(replica, timeout)
        found.send(Joined(rank, versions()))
        self._peer: Peer[ToFollower] = Peer(
            found, Step | AdapterPart | Load | Forget | End, take=self._take, lost=self._lose, silence=silence
        )

    def __iter__(self) -> Iterator[Order]:
        """What there is to do, as it comes. There is no end to it but that of the process."""
        while True:
            yield self._inbox.get()

    def fail(self, reason: str, exit_code: int) -> None:
        """Tells what became of this host, in words that can follow its name, and waits for the other to end."""
        self._peer.send(Failed(reason, exit_code))
        self._peer.wait_for_end(_END_S)

    def _take(self, message: ToFollower) -> None:
        match message:
            case End():
                os._exit(0)
            case _:
                self._inbox.put(message)

    def _lose(self, why: str) -> None:
        # Not the peer's address: this may be called before the peer is there.
        where = self._replica.address.removeprefix("tcp:")
        _say(f"host 0 of replica {self._replica.index} at {where} is lost: {why}.")
        os._exit(ENGINE_DIED)


class Runs(Protocol):
    def run(self, packed: PackedStep, /) -> object: ...

    def load_bytes(self, slot: int, data: bytearray, /) -> object: ...


def follow(leader: Leader, runner: Runs) -> None:
    """Does what the leader says, for as long as it is there. What comes of a step is the leader's to read."""
    adapters: dict[int, bytearray] = {}
    for order in leader:
        match order:
            case Step():
                runner.run(order.packed())
            case AdapterPart(number, data):
                adapters.setdefault(number, bytearray()).extend(data)
            case Load(number, slot):
                runner.load_bytes(slot, adapters[number])
            case Forget(number):
                del adapters[number]


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
