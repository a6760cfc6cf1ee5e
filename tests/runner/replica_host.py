"""One host of a replica whose steps do next to nothing: `python replica_host.py ROLE ADDRESS [SILENCE]`."""

import hashlib
import os
import sys
import threading
import time
from collections.abc import Buffer, Callable

import numpy as np

from hex_llm import follower
from hex_llm.config import Config
from hex_llm.errors import StartError
from hex_llm.launch.task import EngineTask, Task
from hex_llm.runner import followers as followers_module
from hex_llm.runner.buckets import Bucket, Variant
from hex_llm.runner.followers import Followers, Leader, Replica, follow
from hex_llm.runner.packed_step import PackedStep

KEYS = {"stranger": b"other"}
END_S = 30.0  # that hosts have to end: so long that who waits for it in vain is told from a busy machine


def say(text: str) -> None:
    print(text, flush=True)


def packed_step(number: int) -> PackedStep:
    blob = np.arange(number, number + 5, dtype=np.int32)
    targets = np.array([number, 1], np.int32) if number % 2 else None
    admissions, seats = (blob[:2], blob[2:]) * (number % 2), (blob[1:3],) * number
    return PackedStep(Bucket(8, 4, 4, decode=True), Variant.ANY, blob, targets, admissions, seats)


def as_text(packed: PackedStep) -> str:
    arrays = [packed.blob, packed.targets, *packed.admissions, "seats", *packed.seats]
    return f"{packed.bucket} {packed.variant!r} {[a.tolist() if isinstance(a, np.ndarray) else a for a in arrays]}"


def rows_of(number: int) -> np.ndarray:
    """What a host gets of an adapter: more than goes into a message."""
    return np.arange(number, number + 3 * 2**17, dtype=np.float32).reshape(2, -1)


def load_as_text(slot: int, data: Buffer) -> str:
    return f"load {slot} {hashlib.sha256(data).hexdigest()}"


class Saying:
    """Runs steps and loads adapters by printing them."""

    def run(self, packed: PackedStep) -> None:
        say(as_text(packed))

    def load_bytes(self, slot: int, data: bytearray) -> None:
        say(load_as_text(slot, data))


class WithoutMemory(Saying):
    def load_bytes(self, slot: int, data: bytearray) -> None:
        raise MemoryError("no room")


def send_adapters(followers: Followers) -> None:
    """Two that take turns in the second slot, with a step after each load, and a third when the first is gone."""
    adapters = [followers.share({0: np.zeros(1), 1: rows_of(number)}) for number in (1, 2)]
    for number in range(3):
        followers.load(2, adapters[number % 2])
        followers.send(packed_step(number))
    del adapters[0]
    followers.load(1, followers.share({0: np.zeros(1), 1: rows_of(3)}))


def send_steps(followers: Followers) -> None:
    for number in range(3):
        followers.send(packed_step(number))


def lead(
    replica: Replica, silence: float, *, patience: float = 60, tell: Callable[[Followers], None] = send_steps
) -> None:
    followers = Followers(replica, failed=lambda code: say(f"failed {code}"), silence=silence)
    followers.wait(patience)
    say("joined")
    tell(followers)
    for line in sys.stdin:
        if line == "end\n":
            followers.end()
            os._exit(0)
        break
    threading.Event().wait()  # as in a step that waits for the others


def main(role: str, address: str, silence: float = 20.0) -> None:
    followers_module._END_S = END_S
    replica = Replica(0, 2, f"tcp:{address}", KEYS.get(role, b"key"))
    if role.startswith("leader"):
        patience = 0.5 if role == "leader alone" else 60
        lead(replica, silence, patience=patience, tell=send_adapters if role == "leader with adapters" else send_steps)
    if role == "follower without memory":
        follower._build = lambda task: WithoutMemory()
        task = Task((EngineTask(Config()),), fronts=(), rank=1, num_ranks=2, steps=replica.address)
        sys.exit(follower.run_follower(task, replica.key))
    leader = Leader(replica, 1, timeout=60, silence=silence)
    say("joined")
    if role == "follower without a model":
        leader.fail("could not start: there is no model.", 3)
        time.sleep(60)
    follow(leader, Saying())


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:]))
    except StartError as error:
        sys.exit(f"{type(error).__name__}: {error}")
