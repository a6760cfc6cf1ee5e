"""The weights of a model that the disk has no room for: their files come and go, a few at a time."""

import dataclasses
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hex_llm.download.fetch import check_room, fetch_listed
from hex_llm.download.patience import Again, Patience, persist
from hex_llm.download.ranges import download
from hex_llm.download.remote_file import RemoteFile
from hex_llm.download.source import Source
from hex_llm.download.wanted import MODEL
from hex_llm.errors import DownloadError
from hex_llm.progress import Report, progress, tell_nobody


class Shards:
    """`folder` has the model's other files; `files` are those with the weights, by name."""

    def __init__(self, source: Source, folder: Path, files: Sequence[RemoteFile], timeout_s: float, report: Report):
        self.folder = folder
        self.files = {file.name: file for file in files}
        self._source = source
        self._timeout_s = timeout_s
        self._report = report

    def path(self, name: str) -> Path:
        """Where a file is while it is here."""
        return self._source.store.folder / "streamed" / name

    def read(self, name: str, first: int, end: int) -> bytes:
        """Some bytes of a file that is not here, such as its header."""
        file = self.files[name]

        def attempt(number: int) -> bytes:
            site = self._source.site
            with site.open(file.full_name, file.url, span=(first, end), attempt=number) as response:
                if response.status_code != 206:
                    raise DownloadError(f"{file.full_name}: {site.address} sends no parts of files, only all of it.")
                content = response.read()
            if len(content) != end - first:
                raise Again(f"{file.full_name}: of the bytes from {first} to {end} {len(content)} came.")
            return content

        return persist(attempt, Patience(self._timeout_s))

    def in_turn(self, needs: Sequence[Collection[str]]) -> Iterator[list[int]]:
        """Has the files be here one after the other. For each that comes, the numbers of those that have all the files
        now that they need; what nobody needs any more is gone when the next comes, and what nobody needs never comes.
        """
        waiting, here = dict(enumerate(needs)), set[str]()
        with self._room():
            for name in sorted({name for files in needs for name in files}):
                self._bring(name)
                here.add(name)
                ready = [number for number, files in waiting.items() if here.issuperset(files)]
                yield ready
                for number in ready:
                    del waiting[number]
                for done in here - {name for files in waiting.values() for name in files}:
                    self.path(done).unlink()
                    here.remove(done)

    def _bring(self, name: str) -> None:
        path, file = self.path(name), self.files[name]
        check_room(file.full_name, {path: file}, path.parent)
        what = f"{file.full_name} for the devices"
        with progress(f"Downloading {what}", f"Downloaded %s of {what}", file.size, self._report) as advance:
            download({path: file}, self._source.site, Patience(self._timeout_s), advance)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """One process at a time, each with an empty folder: there is no room for more."""
        with self._source.store.lock(self._report):
            folder = self._source.store.folder / "streamed"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                yield
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def open_shards(source: Source, *, timeout_s: float, report: Report = tell_nobody) -> Shards:
    """NoSpace where not even the largest file has room."""
    listing = source.list(Patience(timeout_s))
    others = dataclasses.replace(MODEL, weights=False)
    folder = fetch_listed(source, listing, others, timeout_s=timeout_s, report=report)
    files = [listing.files[name] for name in MODEL.chosen_weights(listing.files, folder, str(source))]
    shards = Shards(source, folder, files, timeout_s, report)
    largest = max(files, key=lambda file: file.size)
    check_room(largest.full_name, {shards.path(largest.name): largest}, source.store.folder)
    return shards
