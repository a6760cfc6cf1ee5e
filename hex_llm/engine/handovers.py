"""What an engine does to hand requests over to others, and to take them over from others."""

from collections.abc import Sequence
from dataclasses import replace

from hex_llm.engine.handover import Came, Complete, FromPorter, Left, Lost, Porter, Room, Taken, Wanted
from hex_llm.engine.incoming import Incoming
from hex_llm.engine.outgoing import Outgoing
from hex_llm.engine.output import Output, Stats
from hex_llm.engine.request import FinishReason, Request
from hex_llm.engine.scheduler import Scheduler
from hex_llm.engine.step import Copier, Slice


class Handovers:
    def __init__(self, copier: Copier, scheduler: Scheduler, porter: Porter):
        self._scheduler = scheduler
        self._porter = porter
        self._outgoing = Outgoing(copier, scheduler.limits, porter)
        self._incoming = Incoming(copier, scheduler, porter)
        self._num_lost = 0

    def add(self, request: Request) -> None:
        if request.hands_over:
            self._outgoing.add(request)

    @property
    def may_be_asked(self) -> bool:
        """Whether there is a request here that another engine may ask for at any moment."""
        return bool(self._outgoing)

    def start(self, step: Sequence[Slice]) -> None:
        """A step was planned and, unless it is empty, handed to the device."""
        self._incoming.fetch()
        self._outgoing.note(step)

    def read(self, outputs: Sequence[Output]) -> None:
        """A step was read, and brought this. Who waits for blocks of a request that has ended hears of it from whoever
        has sent it there, and has not failed to get them.
        """
        for output in outputs:
            if output.finish_reason == FinishReason.HANDED_OVER:
                self._outgoing.end_prompt(output.request_id, output.tokens[-1])
            elif output.finish_reason is not None:
                self._outgoing.forget(output.request_id)

    def abort(self, request_id: str) -> bool:
        """Says whether anything was held of it for another engine."""
        if request_id in self._scheduler.coming:
            self._porter.cancel(request_id)
        self._outgoing.forget(request_id)
        return self._scheduler.release(request_id)

    def expire(self, now: float) -> list[str]:
        """Gives up requests that were handed over and that no engine has taken for long."""
        expired = self._outgoing.expired(now)
        for request_id in expired:
            self._outgoing.forget(request_id, "it was kept for too long")
            self._scheduler.release(request_id)
        return expired

    def hear(self, message: FromPorter) -> None:
        """Of a request that is `Lost`, and was to go on here, nothing is left."""
        match message:
            case Wanted(request_id, first):
                self._outgoing.want(request_id, first)
            case Left(request_id):
                self._outgoing.leave(request_id)
            case Room():
                self._outgoing.send()
            case Taken(request_id):
                self._outgoing.forget(request_id)
                self._scheduler.release(request_id)
            case Came():
                self._incoming.copy_in(message)
            case Complete():
                self._incoming.complete(message)
            case Lost(request_id):
                if request := self._scheduler.coming.get(request_id):
                    self._num_lost += 1
                    self._scheduler.finish(request, FinishReason.ABORT)

    def counted(self, stats: Stats) -> Stats:
        received = self._incoming.received
        return replace(
            stats,
            total_received=received.requests,
            total_received_blocks=received.blocks,
            total_received_bytes=received.num_bytes,
            total_transfer_seconds=received.seconds,
            total_exposed_seconds=received.exposed,
            total_transfers_lost=self._num_lost,
        )
