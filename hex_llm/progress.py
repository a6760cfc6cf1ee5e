"""How far something has come that is counted in bytes: as a bar to a person, as lines to a log."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_REPORT_S = 0.2  # between two reports: bytes come in small pieces
_SAY_S = 30.0  # between two lines of a log

type Report = Callable[[float], None]  # told the share that is done
type Advance = Callable[[int], None]  # told of bytes as they come, from any thread


def tell_nobody(share: float) -> None:
    pass


@contextmanager
def progress(doing: str, done: str, total: int, report: Report) -> Iterator[Advance]:
    """Shows bytes, their rate and the time left. `doing` is said on the way ("Loading weights"), `done` at the end
    ("Loaded %s of weights").
    """
    # Not before: many import this module who never show anything.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
    lock, start, count = threading.Lock(), time.monotonic(), 0
    reported, said = 0.0, start

    def advance(num_bytes: int) -> None:
        nonlocal count, reported, said
        with lock:
            count += num_bytes
            now = time.monotonic()
            if now - reported > _REPORT_S or count >= total:
                reported = now
                bar.update(task, completed=count, total=max(count, total))
                report(count / max(count, total, 1))
            if bar.disable and now - said > _SAY_S:
                said = now
                rate = max(count / (now - start), 1)
                left = max(total - count, 0) / rate
                logger.info("%s: %s of %s, %s/s, %.0f s left.", doing, size(count), size(total), size(rate), left)

    with bar:
        task = bar.add_task("", total=total)
        yield advance
    seconds = max(time.monotonic() - start, 1e-9)
    logger.info("%s in %.1f s (%s/s).", done % size(count), seconds, size(count / seconds))


def size(num_bytes: float) -> str:
    """A number of bytes as a person reads it."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e5 else f"{num_bytes:.0f} bytes"
