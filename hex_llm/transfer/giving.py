"""The side of a Porter whose engine has blocks: who asks for which request, and how far each has been given away."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hex_llm import channel
from hex_llm.engine.handover import PARTS_IN_FLIGHT, FromPorter, Left, Part, Room, Taken, Wanted
from hex_llm.errors import PortError
from hex_llm.frames import Broken
from hex_llm.transfer.asker import Asker
from hex_llm.transfer.line import Line
from hex_llm.transfer.offers import HERE, Offers, TransferServer
from hex_llm.transfer.slots import Slots
from hex_llm.transfer.staging import Staging, num_bytes
from hex_llm.transfer.words import Ask, Beat, Begin, Done, Drop, Finished, Freed, FromFetcher, Hello, Refused

logger = logging.getLogger(__name__)

_RETRY_S = 0.2


@dataclass(slots=True)
class Given:
    """A request that somebody asks for.

    What the engine sends may be meant for whoever asked before, if it does not know yet of who asks now. The content is
    the same, so that a part is right for anybody whose next block is in it, and the rest is not for this one.
    """

    asker: Asker
    number: int
    next: int  # the block that the one who asks has to get next


class Giving:
    """The lock is held while `tell` is called, so that nothing is told of a request after it was cancelled."""

    def __init__(
        self, address: str, key: bytes, hello: Hello, staging: Staging, *, tell: Callable[[FromPorter], None],
        server: TransferServer | None, silence: float,
    ):  # fmt: skip
        self._key = key
        self._hello = hello
        self._staging = staging
        self._tell = tell
        self._server = server
        self._silence = silence
        self._lock = threading.RLock()
        self._given: dict[str, Given] = {}
        self._askers: set[Asker] = set()
        self._lingering = 0  # parts that were offered to engines that are gone
        self._was_full = False
        self._listener = _listen(address)
        self.address = channel.address_of(self._listener)
        threading.Thread(target=self._accept, daemon=True, name="accept engines").start()

    def has_room(self, request_id: str | None) -> bool:
        with self._lock:
            staged = {asker: asker.num_staged for asker in self._askers}
            room = sum(staged.values()) + self._lingering < PARTS_IN_FLIGHT
            given = self._given.get(request_id) if request_id is not None else None
            if given is not None:
                share = PARTS_IN_FLIGHT // max(sum(bool(asker.requests) for asker in self._askers), 1)
                room = room and staged.get(given.asker, 0) < max(share, 1)
            self._was_full = self._was_full or not room
            return room

    def send(self, part: Part) -> None:
        with self._lock:
            given = self._given.get(part.request_id)
            end = part.first + part.count
            if given is None or not part.first <= given.next < end:
                return
            skip, given.next = given.next - part.first, end
            if skip and not given.asker.cuts_parts:
                self.refuse(part.request_id, "it was asked for again while its blocks were sent to another engine")
                self._tell(Left(part.request_id))
            else:
                given.asker.send(given.number, part, skip)

    def finish(self, request_id: str, token: int, num_blocks: int) -> None:
        with self._lock:
            given = self._given.get(request_id)
            if given is not None and given.next >= num_blocks:
                given.asker.say(Finished(given.number, token, given.next))

    def refuse(self, request_id: str, reason: str) -> None:
        """Also for a request that the engine has no longer."""
        with self._lock:
            given = self._given.pop(request_id, None)
            if given is not None:
                del given.asker.requests[given.number]
                given.asker.discard(given.number)
                given.asker.say(Refused(given.number, reason))

    def close(self) -> None:
        channel.stop_listening(self._listener)
        with self._lock:
            for asker in self._askers:
                asker.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(_RETRY_S)  # too many files are open, for one
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True, name="asked for blocks").start()

    def _serve(self, connection: socket.socket) -> None:
        asker = None
        try:
            line = Line(channel.greet(connection, self._key), self._silence)
            asker = self._meet(line)
            with self._lock:
                self._askers.add(asker)
            while True:
                self._take(asker, line.receive(FromFetcher.__value__))
        except (OSError, Broken) as error:
            logger.info("An engine that asked for blocks is gone: %s", error)
        finally:
            if asker is not None:
                self._lose(asker)
            connection.close()

    def _meet(self, line: Line) -> Asker:
        line.receive(Hello)
        line.send(self._hello)
        begin = line.receive(Begin)
        size = num_bytes(self._staging, max(self._staging.counts))
        carrier: Slots | Offers
        match begin.path:
            case "device":
                carrier = HERE
            case "jax" if self._server is not None:
                carrier = self._server.offers(self._silence)
            case "host" if begin.shared:
                carrier = Slots.of_file(size, PARTS_IN_FLIGHT, line.receive_file())
            case "host":
                carrier = Slots(size, PARTS_IN_FLIGHT)
            case _:
                raise Broken(f"Blocks cannot go by {begin.path!r}.")
        streams = begin.path == "host" and not begin.shared
        return Asker(
            line, self._staging, carrier, streams=streams, silence=self._silence, released=self._tell_of_room
        )  # fmt: skip

    def _take(self, asker: Asker, word: FromFetcher) -> None:
        with self._lock:
            match word:
                case Ask():
                    self._ask(asker, word)
                case Drop(number) | Done(number):
                    request_id = asker.requests.pop(number, None)
                    if request_id is None:
                        return  # it was turned away, and the word was under way
                    del self._given[request_id]
                    asker.discard(number)
                    self._tell(Taken(request_id) if isinstance(word, Done) else Left(request_id))
                case Freed(slot):
                    asker.freed(slot)
                case Beat():
                    pass

    def _ask(self, asker: Asker, ask: Ask) -> None:
        if ask.number in asker.requests:
            raise Broken(f"Fetch {ask.number} was begun twice.")
        if ask.request_id in self._given:
            self.refuse(ask.request_id, "another engine asks for it")
            self._tell(Left(ask.request_id))
        self._given[ask.request_id] = Given(asker, ask.number, ask.first)
        asker.requests[ask.number] = ask.request_id
        self._tell(Wanted(ask.request_id, ask.first))

    def _lose(self, asker: Asker) -> None:
        with self._lock:
            self._askers.discard(asker)
            number, seconds = asker.leave()
            self._linger(number, seconds)
            for request_id in asker.requests.values():
                del self._given[request_id]
                self._tell(Left(request_id))
            asker.requests.clear()
        self._tell_of_room()

    def _linger(self, number: int, seconds: float) -> None:
        """Memory that is taken until then, whoever has gone."""
        if not number or not seconds:
            return

        def settle() -> None:
            with self._lock:
                self._lingering -= number
            self._tell_of_room()

        self._lingering += number
        timer = threading.Timer(seconds, settle)
        timer.daemon = True
        timer.start()

    def _tell_of_room(self) -> None:
        with self._lock:
            if self._was_full and self.has_room(None):
                self._was_full = False
                self._tell(Room())


def _listen(address: str) -> socket.socket:
    try:
        if address.startswith("unix:"):
            # Of an engine that was killed; the place is this one's now.
            Path(address.removeprefix("unix:")).unlink(missing_ok=True)
        return channel.listen(address)
    except OSError as error:
        raise PortError(f"Cannot listen at {address} for engines that fetch blocks: {error.strerror}.") from None
