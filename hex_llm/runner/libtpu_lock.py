"""libtpu's lock file. It outlives a process that is killed, and may then keep the next one from the device."""

import fcntl
import importlib.util
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from hex_llm.errors import DeviceBusy

logger = logging.getLogger(__name__)

LOCK = Path("/tmp/libtpu_lockfile")
# With one of these, processes share the chips of a host, and the lock says nothing.
_SHARING = ("ALLOW_MULTIPLE_LIBTPU_LOAD", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS")


def check_libtpu_lock() -> None:
    """Before JAX is imported, and only where it would use a TPU."""
    if importlib.util.find_spec("libtpu") is not None:
        clear_lock(LOCK, os.environ)


def clear_lock(lock: Path, environ: Mapping[str, str]) -> None:
    """Removes a lock that nobody holds; where somebody does, the error names the process."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if not lock.exists() or (platforms and "tpu" not in platforms) or any(map(environ.get, _SHARING)):
        return
    if holder := _holder(lock):
        raise DeviceBusy(f"The TPU is in use by process {holder}, which holds {lock}.")
    try:
        with lock.open("rb+") as file:
            for take in (fcntl.flock, fcntl.lockf):
                take(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.unlink()
    except BlockingIOError:  # by a process of another container, which /proc does not show
        raise DeviceBusy(f"The TPU is in use: a process that cannot be seen from here holds {lock}.") from None
    except FileNotFoundError:  # its holder has just ended
        return
    except OSError as error:
        logger.warning("%s is left over, and cannot be removed: %s.", lock, error.strerror)
    else:
        logger.info("Removed %s, which a process that has ended left there.", lock)


def _holder(lock: Path) -> str | None:
    """The process that has locked the file, by whichever call, as /proc/locks tells it."""
    status, table = lock.stat(), Path("/proc/locks")
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in table.read_text().splitlines() if table.exists() else ():
        words = line.split()  # of which the last four are the process, the file, and a range of bytes
        if words[-3] == name and "->" not in words:
            return words[-4]
    return None
