"""Requests whose blocks come from another engine: has them fetched and copied in, and counts what came."""

from dataclasses import dataclass

from hex_llm.engine.handover import Came, Complete, Porter
from hex_llm.engine.scheduler import Scheduler
from hex_llm.engine.step import Copier


@dataclass(slots=True)
class Received:
    """Since the engine began."""

    requests: int = 0
    blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


class Incoming:
    def __init__(self, copier: Copier, scheduler: Scheduler, porter: Porter):
        self.received = Received()
        self._copier = copier
        self._scheduler = scheduler
        self._porter = porter

    def fetch(self) -> None:
        """What those requests lack that have just got their blocks."""
        for request in self._scheduler.take_coming():
            first = request.num_computed // self._scheduler.limits.block_size
            self._porter.fetch(request.id, request.source, first)

    def copy_in(self, came: Came) -> None:
        part, received = came.part, self.received
        if request := self._scheduler.coming.get(part.request_id):
            self._copier.copy_in(request.blocks[part.first : part.first + part.count], part.pages)
            received.blocks += part.count
            received.num_bytes += came.num_bytes
        self._porter.took(part)

    def complete(self, message: Complete) -> None:
        if self._scheduler.complete(message.request_id, message.token):
            self._porter.acknowledge(message.request_id)
            received = self.received
            received.requests += 1
            received.seconds += message.seconds
            received.exposed += message.exposed
