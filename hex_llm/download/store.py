"""A folder that keeps what was downloaded of one source, in the layout of the Hugging Face Hub's cache.

`blobs` has each file's content once, `snapshots/VERSION` links to it under the files' names, and `refs/NAME` the
version that a name stood for last.
"""

import contextlib
import fcntl
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hex_llm.download.remote_file import RemoteFile
from hex_llm.errors import DownloadError
from hex_llm.progress import Report

logger = logging.getLogger(__name__)

_LOOK_S = 0.2  # between two looks whether another process has finished
_SAY_S = 5.0  # after which it is said who is waited for


@dataclass(frozen=True, slots=True)
class Store:
    folder: Path
    lock_path: Path

    def snapshot(self, version: str) -> Path:
        return self.folder / "snapshots" / version

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.blob

    def is_named(self, version: str, file: RemoteFile) -> bool:
        """Whether it is there, under its own name."""
        return _is_whole(self.snapshot(version) / file.name, file)

    def has(self, version: str, file: RemoteFile) -> bool:
        """Whether it is there; content that another version has left is taken for this one."""
        return self.is_named(version, file) or _is_whole(self.blob(file), file)

    def prepare(self, version: str) -> None:
        with _on_disk(self.folder):
            for folder in (self.snapshot(version), self.folder / "blobs"):
                folder.mkdir(parents=True, exist_ok=True)

    def link(self, version: str, file: RemoteFile) -> None:
        """Gives content that is there the file's name. Only for whoever has the lock."""
        if self.is_named(version, file):
            return
        path = self.snapshot(version) / file.name
        with _on_disk(path):
            path.unlink(missing_ok=True)  # a link to what is no longer there, or what somebody cut
            with contextlib.suppress(FileExistsError):  # another tool was faster
                path.symlink_to(os.path.relpath(self.blob(file), path.parent))

    def version_of(self, name: str) -> str | None:
        """What a branch or a tag stood for when it was last asked for."""
        try:
            return (self.folder / "refs" / name).read_text().strip()
        except OSError:
            return None

    def remember(self, name: str, version: str) -> None:
        if self.version_of(name) == version:
            return
        path = self.folder / "refs" / name
        with _on_disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{threading.get_native_id()}")
            fresh.write_text(version)
            fresh.rename(path)

    @contextlib.contextmanager
    def lock(self, report: Report) -> Iterator[None]:
        """One process at a time; the next one finds what this one got. Killed, it is let go too."""
        with _on_disk(self.lock_path):
            self.lock_path.parent.mkdir(parents=True, exist_ok=True)
            file = self.lock_path.open("a")
        with file:
            say_at = time.monotonic() + _SAY_S
            while not _locks(file.fileno(), self.lock_path):
                if time.monotonic() > say_at:
                    say_at = math.inf
                    logger.info("Another process is at work in %s, and is waited for.", self.folder)
                report(0.0)
                time.sleep(_LOOK_S)
            yield


def _locks(file: int, path: Path) -> bool:
    with _on_disk(path):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextlib.contextmanager
def _on_disk(path: Path) -> Iterator[None]:
    """Tells what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise DownloadError(f"{path} cannot be written to: {error.strerror}.") from None


def _is_whole(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size
