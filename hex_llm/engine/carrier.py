"""Adapters on their way from wherever they lie to this engine. A `Carrier` is what brings them."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class AdapterHere:
    """An adapter that was asked for. `staged` is what `Loader.load_adapter` takes, good for as long as anybody has it:
    the engine lets go of it when it is loaded, or wanted no longer.
    """

    identity: str
    staged: Any


@dataclass(frozen=True, slots=True)
class AdapterLost:
    """An adapter that was asked for and cannot be had, or is none. The rest is what the client is told."""

    identity: str
    message: str
    code: str
    status: int


type FromCarrier = AdapterHere | AdapterLost


class Carrier(Protocol):
    """Fetches, reads and checks adapters in threads of its own; none of this waits for anybody.

    What it has to say (`FromCarrier`) it says to a function that it was made with, from any thread: one word for each
    `fetch` that was not cancelled. The engine's thread calls what is here.
    """

    def fetch(self, identity: str, source: str) -> None:
        """Asks for an adapter, which is to be found at `source`. Who was asked first is wanted first."""
        ...

    def cancel(self, identity: str) -> None:
        """An adapter that was asked for is wanted no longer. What it has said of it already does no harm."""
        ...
