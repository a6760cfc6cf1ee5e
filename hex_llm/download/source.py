"""What a place that has models can be asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hex_llm.download.patience import Patience
from hex_llm.download.remote_file import RemoteFile
from hex_llm.download.site import Site
from hex_llm.download.store import Store


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a source by name, at one moment: `version` is another once one of them is. `ref` is what asked for
    it, where that may be another version the next time.
    """

    version: str
    files: Mapping[str, RemoteFile]
    ref: str | None = None


class Source(Protocol):
    """One model or adapter, wherever it lies. `str` of it names it in messages."""

    store: Store
    site: Site
    offline: bool  # it must not be asked

    def list(self, patience: Patience) -> Listing: ...

    def kept(self) -> Path | None:
        """The folder of the version that it had when it was last asked, where that is known."""
        ...
