"""One host of a replica whose steps do next to nothing: `python replica_host.py ROLE ADDRESS [SILENCE]`."""

import os
import sys
import threading
import time

import numpy as np

from hex_llm.errors import StartError
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


class Saying:
    """Runs a step by printing it."""

    def run(self, packed: PackedStep) -> None:
        say(as_text(packed))


def lead(replica: Replica, silence: float, *, patience: float = 60) -> None:
    followers = Followers(replica, failed=lambda code: say(f"failed {code}"), silence=silence)
    followers.wait(patience)
    say("joined")
    for number in range(3):
        followers.send(packed_step(number))
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
        lead(replica, silence, patience=0.5 if role == "leader alone" else 60)
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
