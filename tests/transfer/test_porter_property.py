"""Engines that hand requests to each other, ask twice, change their minds and read their words late, at random: what is
complete is right, and in the end nobody holds anything."""

import random
import time
import weakref

import numpy as np
import pytest

from hex_llm.engine.handover import Came, Complete, Left, Lost, Room, Taken, Wanted
from tests.transfer.parts import End, content, make_part, wait_until

LENGTHS = {f"request {number}": 1 + 5 * number for number in range(4)}  # blocks of each


class RandomEngine:
    """Has every request's blocks, and fetches them from others."""

    def __init__(self, address: str, path: str, choices: random.Random):
        self.end = End(address, path=path, silence=20.0)
        self._choices = choices
        self._wanted: dict[str, int] = {}  # the next block to send
        self._fetched: dict[str, int] = {}  # the next block to come
        self._landed: list = []
        self._unread: list = []
        self.staged: list[weakref.ref] = []
        self.num_complete = 0

    def act(self, others: list["RandomEngine"]) -> None:
        choices, porter = self._choices, self.end.porter
        request_id = choices.choice([*LENGTHS])
        match choices.randrange(12):
            case 0 if request_id not in self._fetched:
                first = choices.randint(0, LENGTHS[request_id])
                self._fetched[request_id] = first
                porter.fetch(request_id, choices.choice(others).end.address, first)
            case 1 if request_id in self._fetched and choices.random() < 0.2:
                porter.cancel(request_id)  # one engine's word, about both sides
                del self._fetched[request_id]
                self._wanted.pop(request_id, None)
                self._forget(request_id)
            case 2 | 3 | 4:
                self.send()
            case _:
                self.read()

    def send(self) -> None:
        for request_id, first in [*self._wanted.items()]:
            length = LENGTHS[request_id]
            if first == length:
                self.end.porter.finish(request_id, length)
                del self._wanted[request_id]
            elif self.end.porter.has_room(self._choices.choice([None, request_id])):
                count = min(self._choices.randint(1, 8), length - first)
                part = make_part(self.end.staging, request_id, first, count)
                self.staged.append(weakref.ref(part.pages))
                self.end.porter.send(part)
                self._wanted[request_id] = first + count

    def read(self, number: int = 2) -> None:
        for _ in range(number):
            if self._landed and self._choices.random() < 0.7:
                self.end.porter.took(self._landed.pop(0))
            if self._unread:
                self._take(self._unread.pop(0))
            elif not self.end.told.empty():
                self._take(self.end.told.get())

    def _forget(self, request_id: str) -> None:
        """What was told of it before it was cancelled; nothing is told later."""
        while not self.end.told.empty():
            self._unread.append(self.end.told.get())
        about = [
            word.part.request_id if isinstance(word, Came) else getattr(word, "request_id", None)
            for word in self._unread
        ]
        self._unread = [word for word, name in zip(self._unread, about, strict=True) if name != request_id]

    def _take(self, word) -> None:
        match word:
            case Wanted(request_id, first):
                self._wanted[request_id] = first
            case Left(request_id) | Taken(request_id):
                self._wanted.pop(request_id, None)
            case Came(part) if part.request_id in self._fetched:
                self._landed.append(part)
                assert self._fetched[part.request_id] == part.first
                self._fetched[part.request_id] += part.count
                self.check(part)
            case Complete(request_id, token) if request_id in self._fetched:
                assert token == LENGTHS[request_id] == self._fetched.pop(request_id)
                self.num_complete += 1
                self.end.porter.acknowledge(request_id)
            case Lost(request_id):
                self._fetched.pop(request_id, None)
            case Room() | Came() | Complete():
                pass

    def check(self, part) -> None:
        held = np.asarray(part.pages)[:, : part.count]
        assert (held == content(self.end.staging, part.request_id, part.first, part.count)).all()

    @property
    def is_idle(self) -> bool:
        return not (self._wanted or self._fetched or self._landed or self._unread) and self.end.told.empty()


@pytest.mark.parametrize("kind", ["unix host", "tcp host", "unix auto"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_what_is_complete_is_right_and_nothing_stays(kind, seed, tmp_path):
    family, path = kind.split()
    choices = random.Random(seed)
    addresses = ["tcp:127.0.0.1:0" if family == "tcp" else f"unix:{tmp_path}/{number}" for number in range(3)]
    engines = [RandomEngine(address, path, choices) for address in addresses]
    others = {engine: [each for each in engines if each is not engine] for engine in engines}
    for _ in range(1500):
        engine = choices.choice(engines)
        engine.act(others[engine])
        if choices.random() < 0.1:
            time.sleep(0.001)

    def settle() -> bool:
        for engine in engines:
            engine.read(20)
            engine.send()
        return all(engine.is_idle and engine.end.num_held == 0 for engine in engines)

    wait_until(settle, seconds=20)
    assert sum(engine.num_complete for engine in engines) > 20
    assert not [ref for engine in engines for ref in engine.staged if ref() is not None]
    for engine in engines:
        engine.end.porter.close()
