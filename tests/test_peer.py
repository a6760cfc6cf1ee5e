"""The other end of a connection, watched."""

import fcntl
import queue
import resource
import socket

import msgspec

from hex_llm.channel import Channel
from hex_llm.peer import Beat, Peer


class Word(msgspec.Struct, tag=True, array_like=True, frozen=True):
    pass


def test_whoever_has_no_memory_for_a_message_counts_the_other_end_as_lost():
    ours, theirs = socket.socketpair()
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()

    def take(message: Word) -> None:
        raise MemoryError

    Peer[Word](Channel(ours), Word, take=take, lost=lost.put)
    with theirs:
        Channel(theirs).send(Word())
        assert lost.get(timeout=5) == "there is no memory for what it sends"


def test_a_process_with_thousands_of_open_files_notices_that_the_other_end_is_gone():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard > 0 else 4096, hard))
    try:
        ours, theirs = socket.socketpair()
        with ours:
            high = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, 2000))
        lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        Peer[Beat](Channel(high), Beat, take=lambda message: None, lost=lost.put)
        theirs.close()
        assert lost.get(timeout=5) == "its connection has ended"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
