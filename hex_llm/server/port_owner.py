"""Which process listens on a port, as far as /proc shows it."""

from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"


def port_owner(port: int) -> str:
    """A name for who listens there, such as to begin a sentence with."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()) in sockets:
                process = link.parents[1]
                return f"Process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # it is gone, or another user's
            continue
    return "Another program"


def _listening(port: int) -> Iterator[str]:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if not table.exists():
            continue
        for line in table.read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                yield inode
