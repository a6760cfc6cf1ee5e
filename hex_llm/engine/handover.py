"""Blocks of KV cache on their way from the engine that computed a prompt to the one that goes on with it.

The one that goes on asks for a request's blocks, gets them in parts as they are computed, and the first token after
them; when it has all of it it says so, and the other gives the blocks free. A `Porter` is what carries them.
"""

from dataclasses import dataclass
from typing import Any, Protocol

# At the most: parts that are on their way out of an engine, those copied before anybody asks for them, and those that
# have come and are not in their blocks yet.
PARTS_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Some blocks of a request, the `first` of them by its number within the request."""

    request_id: str
    first: int
    count: int
    pages: Any  # a copy on the device: from `Runner.copy_out`, or for `Runner.copy_in`


@dataclass(frozen=True, slots=True)
class Wanted:
    """Another engine asks for a request's blocks, from its block number `first` on."""

    request_id: str
    first: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The other engine has all of it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Left:
    """The other engine asks no longer; it may have gone."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Room:
    """There is room for another part, after there was none."""


@dataclass(frozen=True, slots=True)
class Came:
    """A part, for the engine that goes on; `Porter.took` is to be called when `copy_in` has it."""

    part: Part
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Complete:
    """All parts of a request have come, and this is the token after them."""

    request_id: str
    token: int
    seconds: float  # that it took to carry them, part by part
    exposed: float  # seconds since the token was there, which nothing was computed in


@dataclass(frozen=True, slots=True)
class Lost:
    """The rest of a request's blocks cannot be had."""

    request_id: str
    reason: str


type FromPorter = Wanted | Taken | Left | Room | Came | Complete | Lost


class Porter(Protocol):
    """Carries parts between this engine and others, from threads of its own; none of this waits for anybody.

    What it has to say (`FromPorter`) it says to a function that it was made with, from any thread. The engine's
    thread calls what is here.
    """

    @property
    def address(self) -> str:
        """Where other engines ask for blocks."""
        ...

    def has_room(self, request_id: str) -> bool:
        """Whether another part of a request may be copied out: no more than a few are under way at a time, and of
        those no engine has more than its share.
        """
        ...

    def send(self, part: Part) -> None:
        """To whoever asked for the request; nowhere, where nobody does any more. Parts of a request go in order."""
        ...

    def finish(self, request_id: str, token: int, num_blocks: int) -> None:
        """All parts have been sent, and this is the token after them. The number is of all blocks of the request: who
        asks now may be another than the engine knows of, and lack some of them.
        """
        ...

    def refuse(self, request_id: str, reason: str) -> None:
        """What was asked for is not to be had."""
        ...

    def fetch(self, request_id: str, source: str, first: int) -> None:
        """Asks the engine at `source` for a request's blocks, from its block number `first` on."""
        ...

    def took(self, part: Part) -> None:
        """A part that came has been handed to the device, and makes room for another."""
        ...

    def acknowledge(self, request_id: str) -> None:
        """All of a request is here: the other engine may forget it."""
        ...

    def cancel(self, request_id: str) -> None:
        """A request is wanted no longer. Nothing more is heard of it."""
        ...
