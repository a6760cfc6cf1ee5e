"""Processes that start together, such as replicas, compile each program once: whoever comes second waits for the first
and finds its work in the cache.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_WAIT_S = 600.0  # for somebody else's work, before doing it oneself
_LOOK_S = 0.02


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Holds a lock, if there is a place for it, while the body runs. It goes with the process, however that ends."""
    file = None if lock is None else _take(lock)
    try:
        yield
    finally:
        if lock is not None and file is not None:
            with suppress(OSError):
                lock.unlink()  # while it is held: who waits for it sees that the name is another file's, or nobody's
            os.close(file)


def _take(lock: Path) -> int | None:
    """None where the folder cannot be written to, or knows no locks, or the wait is too long: then all do the work."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(file, lock):
                return file
            os.close(file)
        except BlockingIOError:
            os.close(file)
            time.sleep(_LOOK_S)
        except OSError:
            os.close(file)
            return None
    return None


def _is_there(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
