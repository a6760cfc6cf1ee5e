"""A folder that keeps downloads, each in a folder of its own, up to so many bytes: what was not used for longest goes.

Several processes may have one. Whoever uses a folder has a lock on a file in it, which the kernel lets go of where the
process ends; whoever would remove one needs the lock for itself. A folder that is being filled has another name, and
its own when it is whole.
"""

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from hex_llm.download.patience import Patience
from hex_llm.errors import NoSpace
from hex_llm.progress import size

_LOCK = ".lock"
_PART, _GONE = ".part-", ".gone-"
_LOOK_S = 0.1  # between two looks whether another process has finished


class Hold:
    """A folder that stays as long as this is not closed."""

    def __init__(self, folder: Path, lock: int):
        self.folder = folder
        self._lock = lock

    def close(self) -> None:
        os.close(self._lock)


class Disk:
    """Folders by name. All of it raises OSError where the disk does not play along."""

    def __init__(self, folder: Path, most_bytes: int):
        self._folder = folder
        self._most_bytes = most_bytes
        self._room = threading.Lock()
        self._coming: dict[str, int] = {}  # bytes that folders will have
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.glob(f"{_GONE}*"):  # by one who was killed while removing it
            shutil.rmtree(left, ignore_errors=True)

    def hold(self, name: str) -> Hold | None:
        """A folder that is there."""
        folder = self._folder / name
        lock = _locked(folder, fcntl.LOCK_SH)
        if lock is None:
            return None
        os.utime(lock)  # when it was last used
        return Hold(folder, lock)

    def remove(self, name: str) -> None:
        """Unless somebody uses it."""
        self._remove(self._folder / name)

    @contextlib.contextmanager
    def fill(self, name: str, num_bytes: int, patience: Patience) -> Iterator[Path | None]:
        """A folder to put files in, which has the name at the end, if nothing is raised; what another left in it,
        unfinished, is still there. None where another process has just done the same. NoSpace where all that could give
        way is in use.
        """
        part = self._folder / f"{_PART}{name}"
        lock = self._begin(part, self._folder / name, patience)
        if lock is None:
            yield None
            return
        try:
            with self._reserved(name, num_bytes):
                yield part
                part.rename(self._folder / name)
        finally:
            os.close(lock)

    def _begin(self, part: Path, whole: Path, patience: Patience) -> int | None:
        """The lock on a folder that nobody else fills; None once it is whole."""
        while not whole.exists():
            with contextlib.suppress(FileNotFoundError):  # somebody may take it away at any time
                part.mkdir(mode=0o700, exist_ok=True)
                os.close(os.open(part / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
            lock = _locked(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is None:
                patience.renew()
                time.sleep(_LOOK_S)
            elif whole.exists():  # since we looked
                os.close(lock)
                self._remove(part)
            else:
                return lock
        return None

    @contextlib.contextmanager
    def _reserved(self, name: str, num_bytes: int) -> Iterator[None]:
        with self._room:
            self._make_room(name, num_bytes)
            self._coming[name] = num_bytes
        try:
            yield
        finally:
            with self._room:
                del self._coming[name]

    def _make_room(self, name: str, num_bytes: int) -> None:
        if num_bytes > self._most_bytes:
            raise NoSpace(f"{size(num_bytes)} are more than the {size(self._most_bytes)} that {self._folder} may have.")
        others = [path for path in self._folder.iterdir() if path.name != f"{_PART}{name}"]
        used = sorted((*self._usage(path), path) for path in others)
        over = sum(taken for _, taken, _ in used) + num_bytes - self._most_bytes
        for _, taken, path in used:
            if over > 0 and self._remove(path):
                over -= taken
        if over > 0:
            raise NoSpace(
                f"{size(num_bytes)} more would be {size(over)} beyond the {size(self._most_bytes)} that {self._folder}"
                " may have, and all the rest is in use."
            )

    def _usage(self, folder: Path) -> tuple[float, int]:
        """When a folder was last used, and what it takes."""
        try:
            stats = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder)}
        except (FileNotFoundError, NotADirectoryError):
            return 0.0, 0
        coming = self._coming.get(folder.name.removeprefix(_PART), 0)
        last = stats[_LOCK].st_mtime if _LOCK in stats else 0.0
        return last, max(coming, sum(stat.st_size for stat in stats.values()))

    def _remove(self, folder: Path) -> bool:
        lock = _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is None:
            return False
        try:
            gone = self._folder / f"{_GONE}{uuid4().hex}"
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        finally:
            os.close(lock)
        return True


def _locked(folder: Path, how: int) -> int | None:
    """A lock on a folder; None where there is none of that name, or where it is not to be had."""
    path = folder / _LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, how)
        if os.path.samestat(os.fstat(lock), path.stat()):  # or it was removed while we waited
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None
