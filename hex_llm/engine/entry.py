"""A request under way, as its router sees it: which engines have it, and what its client has been told."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from hex_llm.engine.client import EngineClient, Sink
from hex_llm.engine.output import Output
from hex_llm.engine.replica import Load
from hex_llm.engine.request import FinishReason, Request
from hex_llm.errors import BlocksLost, EngineDead, HexError, Unavailable


class Moves(Protocol):
    """What the router does about a request."""

    def go_on(self, entry: "Entry", *, again: bool = False) -> None:
        """An engine has begun with its prompt: finds one that goes on with it after that."""
        ...

    def replay(self, entry: "Entry", error: HexError) -> None:
        """The engine is lost that had it: finds another."""
        ...

    def replay_answer(self, entry: "Entry", error: HexError) -> None:
        """The engine is lost that was to go on with it: finds another for that, or for all."""
        ...

    def resend(self, entry: "Entry") -> None:
        """Finds another engine for one that nobody has died with."""
        ...

    def end(self, entry: "Entry", *, completed: bool) -> None: ...

    def fail(self, entry: "Entry", error: HexError) -> None: ...


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one HTTP request, wherever they are."""

    name: str
    size: int = 0
    begun: bool = False  # one of them
    answers: int = -1  # the engine that one of them went to for its answer


class Entry:
    """The sink of the engine that has the request. While one computes its prompt for another, `load` is what it weighs
    on the first and `next_load` on the second, and their sinks are `PromptSink` and `AnswerSink`.
    """

    __slots__ = (
        "_told", "arrival", "begun", "early", "group", "handed", "is_handed_over", "load", "moves", "next_load",
        "num_lost", "num_replays", "num_sent", "request", "sink",
    )  # fmt: skip

    def __init__(self, moves: Moves, request: Request, sink: Sink, group: Group):
        self.moves = moves
        self.request = request
        self._told = request.output
        self.sink = sink
        self.group = group
        self.load: Load | None = None  # while an engine has it
        self.next_load: Load | None = None
        self.arrival = time.monotonic()
        self.begun = False
        self.num_replays = 0  # times that an engine died which had it
        self.num_lost = 0  # times that an engine could not have its blocks from another
        self.num_sent = 0  # times that it began somewhere
        self.handed: Request | None = None  # as the engine has it that hands it over, as long as that is there
        self.is_handed_over = False  # all of its prompt is computed, and the token after it told
        self.early: list[Output] = []  # what the second engine said before that was told

    @property
    def sent_id(self) -> str:
        """Each time another: what an engine still says of the time before is of no interest then."""
        return self.request.id if self.num_sent < 2 else f"{self.request.id}~{self.num_sent}"

    def clients(self) -> Iterator[EngineClient]:
        """Of the engines that have it."""
        for load in (self.load, self.next_load):
            if load is not None and load.replica.client is not None:
                yield load.replica.client

    def leave(self) -> None:
        """No engine has it any more."""
        for client in self.clients():
            client.abort([self.sent_id])  # which is nothing to those that it has ended with
        for load in (self.load, self.next_load):
            if load is not None:
                load.end()
        self.load = self.next_load = self.handed = None
        self.is_handed_over = False
        self.early = []

    def begin(self, waited: float) -> None:
        if not self.begun:
            self.begun = self.group.begun = True
            self.sink.begin(waited)

    def take(self, output: Output) -> None:
        """Runs for every token: what the client has been told is what a replay goes on from."""
        request, load, told = self.request, self.load, self._told
        told += output.tokens
        assert load is not None
        num_left = request.max_output - len(told)
        if load.num_prompt or num_left < load.num_answer:
            load.move(num_left)
            request.num_cached = request.num_cached or output.num_cached
        if output.finish_reason is not None:
            self.moves.end(self, completed=output.finish_reason != FinishReason.ERROR)
        self.sink.take(output)

    def take_prompt(self, output: Output) -> None:
        """The token after the prompt, from the engine that hands over."""
        if output.finish_reason != FinishReason.HANDED_OVER:
            self.take(output)
            return
        self.is_handed_over = True
        self.take(msgspec.structs.replace(output, finish_reason=None))
        if self.load is not None and self.next_load is None:  # who was to go on has given up meanwhile
            self.moves.go_on(self, again=True)
        early, self.early = self.early, []
        for each in early:
            self.take_answer(each)

    def take_answer(self, output: Output) -> None:
        """A token from the engine that goes on."""
        if self.next_load is not None:
            if not self.is_handed_over:
                self.early.append(output)
                return
            self._arrive()
        if self.load is not None:  # else it was stopped by what came before
            self.take(output)

    def _arrive(self) -> None:
        """The second engine has all of it, and the first one nothing to do with it any more."""
        assert self.load is not None
        if self.load.replica.client is not None:
            self.load.replica.client.abort([self.sent_id])  # the engine may not have heard that they were taken
        self.load.end()
        self.load, self.next_load, self.handed = self.next_load, None, None

    def lose_blocks(self) -> None:
        """The second engine cannot have them. Why that is the first one may be about to say, since it has ended with
        the request or has died: while it has not said anything yet, its word is waited for.
        """
        self.num_lost += 1
        if self.is_handed_over:
            self.moves.resend(self)
        elif self.next_load is not None:
            self.next_load.end()
            self.next_load = None

    def fail(self, error: HexError) -> None:
        match error:
            case EngineDead():
                self.moves.replay(self, error)
            case Unavailable(code="queue_timeout") if self.group.begun:  # with another replica
                self.moves.resend(self)
            case _:
                self.moves.fail(self, error)


class PromptSink:
    """Hears of the engine that computes a request's prompt for another."""

    __slots__ = ("_entry",)

    def __init__(self, entry: Entry):
        self._entry = entry

    def begin(self, waited: float) -> None:
        """Now the other one is wanted: it fetches what is there while more is computed."""
        self._entry.begin(waited)
        self._entry.moves.go_on(self._entry)

    def take(self, output: Output) -> None:
        self._entry.take_prompt(output)

    def fail(self, error: HexError) -> None:
        """Once it is handed over the other engine has it, or will say that it cannot."""
        entry = self._entry
        if isinstance(error, EngineDead) and entry.is_handed_over and entry.next_load is not None:
            entry.handed = None
        else:
            entry.fail(error)


class AnswerSink:
    """Hears of the engine that goes on with a request."""

    __slots__ = ("_entry",)

    def __init__(self, entry: Entry):
        self._entry = entry

    def begin(self, waited: float) -> None:
        pass

    def take(self, output: Output) -> None:
        self._entry.take_answer(output)

    def fail(self, error: HexError) -> None:
        entry = self._entry
        if isinstance(error, BlocksLost):
            entry.lose_blocks()
        elif isinstance(error, EngineDead) and entry.next_load is not None:
            entry.moves.replay_answer(entry, error)
        else:
            entry.fail(error)
