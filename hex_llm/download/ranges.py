"""Files in ranges, several at a time, each file under another name until it is there and right.

Of a file X there are X.part, as long as X, and X.part.N, a byte for each of its ranges of N bytes: 1 where the range is
there. So whoever comes after a process that was killed has only the rest to do.
"""

import errno
import io
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hex_llm import faults
from hex_llm.download.patience import Again, Patience
from hex_llm.download.remote_file import RemoteFile
from hex_llm.download.site import Site
from hex_llm.errors import DownloadError, NoSpace
from hex_llm.progress import Advance, size

logger = logging.getLogger(__name__)

RANGE = 32 * 2**20
_CONNECTIONS = 8
_GONE = {400, 401, 403, 404, 410}  # that an address answers with to which one was sent on, once it has expired


def download(files: Mapping[Path, RemoteFile], site: Site, patience: Patience, advance: Advance) -> None:
    """Each file to its path. What is there of one already is told to `advance` too.

    Threads that are still at it when one has failed are told to end, and not waited for: one may hang in a connection.
    """
    jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    count = 0
    # Small files first: one that is refused is known at once.
    for path, file in sorted(files.items(), key=lambda each: each[1].size):
        with _on_disk(path, file):
            part = _Part(path, file, site, patience, advance)
        for number in part.missing():
            jobs.put(partial(part.fill, number))
            count += 1
    for _ in range(_CONNECTIONS):
        jobs.put(None)
        threading.Thread(target=_work, args=(jobs, outcomes), daemon=True, name="download").start()
    try:
        for _ in range(count):
            if error := outcomes.get():
                raise error
    except BaseException:
        patience.stop()
        raise


def _work(
    jobs: queue.SimpleQueue[Callable[[], None] | None], outcomes: queue.SimpleQueue[BaseException | None]
) -> None:
    while job := jobs.get():
        try:
            job()
        except BaseException as error:
            outcomes.put(error)
        else:
            outcomes.put(None)


def bytes_missing(path: Path, file: RemoteFile) -> int:
    """What the disk must have room for."""
    part = _part_path(path)
    present = part.stat().st_blocks * 512 if part.exists() else 0
    return max(0, file.size - present)


def _part_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


@contextmanager
def _on_disk(path: Path, file: RemoteFile) -> Iterator[None]:
    """Tells what the disk refuses."""
    try:
        yield
    except OSError as error:
        folder = path.parent
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(f"{file.full_name} cannot be written to {folder}: {error.strerror}.") from None
        left, free = size(bytes_missing(path, file)), size(shutil.disk_usage(folder).free)
        raise NoSpace(f"{file.full_name} needs {left} more in {folder}, which has {free} left.") from None


class _Part:
    """A file that is on its way."""

    def __init__(self, path: Path, file: RemoteFile, site: Site, patience: Patience, advance: Advance):
        self.file = file
        self._path = path
        self._site = site
        self._patience = patience
        self._advance = advance
        self._url = file.url  # or the one that it leads to
        self._lock = threading.Lock()
        self._data_path = _part_path(path)
        self._ticks_path = path.with_name(f"{path.name}.part.{RANGE}")
        self._data, self._ticks = _open(self._data_path), _open(self._ticks_path)
        count = max(1, -(-file.size // RANGE))
        if _length(self._ticks) != count or _length(self._data) != file.size:
            self._forget()
        ticks = os.pread(self._ticks.fileno(), count, 0)
        self._missing = {number for number, tick in enumerate(ticks) if not tick}
        if not self._missing:  # whoever got it all did not come to look at it
            self._missing = {count - 1}
        for number in set(range(count)) - self._missing:
            advance(len(self._range(number)))

    def missing(self) -> list[int]:
        return sorted(self._missing)

    def fill(self, number: int) -> None:
        """Gets a range. The last one makes the file."""
        with _on_disk(self._path, self.file):
            self._get(self._range(number), self._advance)
            os.pwrite(self._ticks.fileno(), b"\1", number)
            with self._lock:
                self._missing.discard(number)
                is_whole = not self._missing
            if is_whole:
                self._finish()

    def _range(self, number: int) -> range:
        return range(number * RANGE, min((number + 1) * RANGE, self.file.size))

    def _get(self, span: range, advance: Advance) -> None:
        at, tries = span.start, 0
        while at < span.stop:
            self._patience.check()
            reached, again = self._read(at, span.stop, tries, advance)
            tries = 0 if reached > at else tries
            at = reached
            if again is not None:
                self._patience.wait(again, tries)
                tries += 1

    def _read(self, at: int, end: int, tries: int, advance: Advance) -> tuple[int, Again | None]:
        """Writes what comes. Returns how far that has got, and why no further."""
        url = self._url
        try:
            with self._site.open(self.file.full_name, url, span=(at, end), attempt=tries) as response:
                self._url = str(response.url)
                skip = at if response.status_code == 200 else 0  # a server may know no ranges
                for chunk in response.iter_raw():
                    self._patience.check()
                    own = chunk[skip : skip + end - at]
                    skip = max(0, skip - len(chunk))
                    if not own:
                        continue
                    self._patience.renew()
                    self._write(own, at)
                    at += len(own)
                    advance(len(own))
                    if at == end:
                        return at, None
        except Again as again:
            return at, again
        except DownloadError as error:
            if url == self.file.url or error.status not in _GONE:
                raise
            self._url = self.file.url
            return at, Again(str(error))
        return at, Again(f"{self.file.full_name}: what came ended at byte {at}, before byte {end}.")

    def _write(self, data: bytes, at: int) -> None:
        if faults.reach("source.write"):
            data = bytes([data[0] ^ 1]) + data[1:]
        while data:  # a disk that is almost full takes some of it
            written = os.pwrite(self._data.fileno(), data, at)
            data, at = data[written:], at + written

    def _finish(self) -> None:
        """Under its own name only if it is right; if not, all of it is got once more, and no third time."""
        found = self.file.digest.of(self._data_path)
        if found != self.file.digest.value:
            logger.warning("%s came damaged, and is downloaded once more.", self.file.full_name)
            self._forget()
            self._get(range(self.file.size), lambda num_bytes: None)
            found = self.file.digest.of(self._data_path)
        if found != self.file.digest.value:
            self._forget()
            kind = self.file.digest.kind
            raise DownloadError(
                f"{self.file.full_name} came damaged twice: its {kind} is {found}, not {self.file.digest.value}."
            )
        os.fsync(self._data.fileno())
        self._data_path.rename(self._path)
        self._ticks_path.unlink()

    def _forget(self) -> None:
        """Begins again, with nothing."""
        count = max(1, -(-self.file.size // RANGE))
        for file, length in ((self._data, self.file.size), (self._ticks, count)):
            file.truncate(0)
            file.truncate(length)


def _open(path: Path) -> io.FileIO:
    """Closed when the last thread has forgotten it."""
    return io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+")


def _length(file: io.FileIO) -> int:
    return os.fstat(file.fileno()).st_size
