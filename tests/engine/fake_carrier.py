"""A carrier without threads: what it was asked for comes, or does not, when a test says so."""

from collections import deque
from collections.abc import Iterable

from hex_llm.engine.carrier import AdapterHere, AdapterLost, FromCarrier


def source_of(adapter: str) -> str:
    return f"gs://adapters/{adapter}" if adapter else ""


class FakeCarrier:
    """An adapter is staged as its own name. Those that are `bad` cannot be had."""

    def __init__(self, bad: Iterable[str] = ()):
        self.bad = {*bad}
        self.asked: list[str] = []  # that nothing was said of yet, in their order
        self.said: deque[FromCarrier] = deque()
        self.log: list[tuple[str, str]] = []  # all that was asked of it

    def fetch(self, identity: str, source: str) -> None:
        assert source == source_of(identity)
        assert identity not in self.asked, "it is being fetched"
        self.asked.append(identity)
        self.log.append(("fetch", identity))

    def cancel(self, identity: str) -> None:
        """What was said before is heard all the same, as from a thread that was quicker."""
        if identity in self.asked:
            self.asked.remove(identity)
        self.log.append(("cancel", identity))

    def bring(self, identity: str) -> None:
        self.asked.remove(identity)
        lost = AdapterLost(identity, f"{identity} is no adapter.", "adapter_invalid", 404)
        self.said.append(lost if identity in self.bad else AdapterHere(identity, identity))

    def bring_all(self) -> None:
        for identity in list(self.asked):
            self.bring(identity)
