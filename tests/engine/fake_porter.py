"""A porter without sockets or threads: what it has to say waits in a list until somebody asks."""

from collections import deque

from hex_llm.engine.handover import Came, Complete, FromPorter, Left, Lost, Part, Room, Taken, Wanted

PARTS = 2  # under way from each


class FakePorter:
    """One of a `port`, in which they find each other by address."""

    def __init__(self, port: dict[str, "FakePorter"], address: str):
        self.address = address
        self.said: deque[FromPorter] = deque()
        self.askers: dict[str, FakePorter] = {}  # who asks here, by request
        self.next: dict[str, int] = {}  # the block that they get next
        self.reached: dict[str, int] = {}  # the end of those that were sent to anybody, or that anybody had
        self.sources: dict[str, FakePorter] = {}  # whom is asked from here
        self.under_way: list[tuple[Part, FakePorter]] = []
        self.num_sent = 0  # blocks
        self.heard: list[str] = []  # the names of all that was said
        self._port = port
        port[address] = self

    def hear(self) -> FromPorter:
        """The next that it has to say."""
        self.heard.append(type(self.said[0]).__name__)
        return self.said.popleft()

    def has_room(self, request_id: str) -> bool:
        return len(self.under_way) < PARTS

    def send(self, part: Part) -> None:
        assert self.has_room(part.request_id)
        """What is meant for whoever asked before is nothing to one that lacks other blocks."""
        end = part.first + part.count
        self.reached[part.request_id] = max(self.reached.get(part.request_id, 0), end)
        asker = self.askers.get(part.request_id)
        if asker is not None and part.first == self.next[part.request_id]:
            self.next[part.request_id] = end
            self.under_way.append((part, asker))
            self.num_sent += part.count
            asker.said.append(Came(part, part.pages.nbytes))

    def finish(self, request_id: str, token: int) -> None:
        asker = self.askers.get(request_id)
        if asker is not None and self.next[request_id] == self.reached[request_id]:
            asker.said.append(Complete(request_id, token, 2.0, 1.0))

    def refuse(self, request_id: str, reason: str) -> None:
        if asker := self.askers.pop(request_id, None):
            asker._lose(request_id, reason)

    def fetch(self, request_id: str, source: str, first: int) -> None:
        there = self._port.get(source)
        assert request_id not in self.sources, "it is being fetched"
        if there is None:
            self.said.append(Lost(request_id, "nobody is there"))
            return
        there.askers[request_id] = self
        there.next[request_id] = first
        there.reached[request_id] = max(there.reached.get(request_id, 0), first)
        self.sources[request_id] = there
        there.said.append(Wanted(request_id, first))

    def took(self, part: Part) -> None:
        for source in self._port.values():
            source._arrive(part)

    def acknowledge(self, request_id: str) -> None:
        source = self.sources.pop(request_id)
        assert source.askers.pop(request_id) is self
        source.said.append(Taken(request_id))

    def cancel(self, request_id: str) -> None:
        if source := self.sources.pop(request_id, None):
            del source.askers[request_id]
            source.said.append(Left(request_id))
        self._hush(request_id)

    def die(self) -> None:
        if self._port.get(self.address) is self:
            del self._port[self.address]
        for request_id, asker in self.askers.items():
            asker._lose(request_id, "it is gone")
        for request_id, source in self.sources.items():
            if source.askers.get(request_id) is self:
                del source.askers[request_id]
                source.said.append(Left(request_id))
        for source in self._port.values():
            source.under_way = [each for each in source.under_way if each[1] is not self]
            source.said.append(Room())
        self.askers, self.sources = {}, {}

    def check_empty(self) -> None:
        assert (self.askers, self.sources, self.under_way) == ({}, {}, [])

    def _arrive(self, part: Part) -> None:
        before = len(self.under_way)
        self.under_way = [each for each in self.under_way if each[0] is not part]
        if before == PARTS > len(self.under_way):
            self.said.append(Room())

    def _lose(self, request_id: str, reason: str) -> None:
        del self.sources[request_id]
        self._hush(request_id)
        self.said.append(Lost(request_id, reason))

    def _hush(self, request_id: str) -> None:
        """Drops what nobody has heard yet; room is made for it all the same."""
        for each in list(self.said):
            if isinstance(each, Came) and each.part.request_id == request_id:
                self.said.remove(each)
                self.took(each.part)
            elif isinstance(each, Complete | Lost) and each.request_id == request_id:
                self.said.remove(each)
