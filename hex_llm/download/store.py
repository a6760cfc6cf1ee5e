"""A folder that keeps what was downloaded of one source, in the layout of the Hugging Face Hub's cache.

`blobs` has each file's content once, `snapshots/VERSION` links to it under the files' names, and `refs/NAME` the
version that a name stood for last.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hex_llm.download.remote_file import RemoteFile
from hex_llm.errors import DownloadError
from hex_llm.progress import Report

_LOOK_S = 0.2  # between two looks whether another process has finished


@dataclass(frozen=True, slots=True)
class Store:
    folder: Path
    lock_path: Path

    def snapshot(self, version: str) -> Path:
        return self.folder / "snapshots" / version

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.blob

    def has(self, version: str, file: RemoteFile) -> bool:
        """Whether it is there; content that another version has left is taken for this one."""
        return any(_is_whole(path, file) for path in (self.snapshot(version) / file.name, self.blob(file)))

    def prepare(self, version: str) -> None:
        try:
            for folder in (self.snapshot(version), self.folder / "blobs"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DownloadError(f"{self.folder} cannot be made: {error.strerror}.") from None

    def link(self, version: str, file: RemoteFile) -> None:
        """Gives content that is there the file's name."""
        path = self.snapshot(version) / file.name
        if _is_whole(path, file):
            return
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
        path = self.folder / "refs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(version)
        fresh.rename(path)

    @contextlib.contextmanager
    def lock(self, report: Report) -> Iterator[None]:
        """One process at a time; the next one finds what this one got. Killed, it is let go too."""
        try:
            self.lock_path.parent.mkdir(parents=True, exist_ok=True)
            file = self.lock_path.open("a")
        except OSError as error:
            raise DownloadError(f"{self.lock_path} cannot be made: {error.strerror}.") from None
        with file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    report(0.0)
                    time.sleep(_LOOK_S)
            yield


def _is_whole(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size
