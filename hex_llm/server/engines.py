"""The engines of an HTTP process: lets them in when they connect, be it for the first time or again, and ends those
that give no sign of life any more.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hex_llm.channel import GREET_S, Channel, greet
from hex_llm.config import Config
from hex_llm.engine.client import EngineClient
from hex_llm.engine.router import Router
from hex_llm.engine.wire import Hello
from hex_llm.frames import Broken
from hex_llm.launch.fleet import Fleet
from hex_llm.process import machine

logger = logging.getLogger(__name__)

_GREETERS = 8  # that may take so long at a time
_LOOK_S = 0.5  # between two looks at the engines
_STACKS_S = 1.0  # that an engine has to write down where it hangs
_PAUSE_S = 1.0  # where no connection can be accepted


@dataclass(frozen=True, slots=True)
class _Member:
    """A replica that is connected. Its process can be sent signals where it is one of this machine's."""

    client: EngineClient
    pid: int
    is_local: bool


class Engines:
    """`hung` are the replicas that were ended for their silence, and have not come back."""

    def __init__(self, config: Config, router: Router, door: socket.socket, key: bytes, fleet: Fleet | None):
        self.hung: set[int] = set()
        self._config = config
        self._router = router
        self._door = door
        self._key = key
        self._fleet = fleet
        self._members: dict[int, _Member] = {}
        self._greeters = ThreadPoolExecutor(_GREETERS, thread_name_prefix="greet")
        self._greetings: set[asyncio.Task[None]] = set()

    def describe(self) -> str:
        """Who they were, for a log."""
        pids = dict.fromkeys(str(member.pid) for _, member in sorted(self._members.items()))
        return f"process{'es' if len(pids) > 1 else ''} ({', '.join(pids) or 'which never connected'})"

    async def let_in(self) -> None:
        """Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        self._door.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(self._door)
            except OSError as error:
                logger.error("An engine's connection cannot be accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            greeting = asyncio.create_task(self._meet(connection))
            self._greetings.add(greeting)
            greeting.add_done_callback(self._greetings.discard)

    async def _meet(self, connection: socket.socket) -> None:
        try:
            loop = asyncio.get_running_loop()
            channel, hello = await loop.run_in_executor(self._greeters, _hear, connection, self._key)
        except (OSError, Broken) as error:
            logger.warning("Somebody who connected as an engine is turned away: %s", error)
            return
        if not 0 <= hello.replica < self._config.num_engines:
            logger.warning("An engine that calls itself replica %d is turned away.", hello.replica)
            channel.socket.close()
            return
        client = EngineClient()
        await client.connect(channel)
        self._members[hello.replica] = _Member(client, hello.pid, hello.machine == machine())
        self.hung.discard(hello.replica)
        self._router.join(hello.replica, client)

    async def watch(self) -> None:
        """Gives engines signs of life, and ends those that have given none for too long. Runs until it is cancelled."""
        overdue = dict.fromkeys(range(self._config.num_engines), 0)
        while True:
            await asyncio.sleep(_LOOK_S)
            for replica, member in list(self._members.items()):
                member.client.beat()
                silent, compiling = member.client.silence()
                limit = self._config.compile_timeout_s if compiling else self._config.step_timeout_s
                # Twice, for it may have been this process that was held up, with signs of life yet to be read.
                overdue[replica] = overdue[replica] + 1 if silent > limit and not member.client.lost else 0
                if overdue[replica] == 2:
                    logger.critical(
                        "%s has given no sign of life for %.0f s; the limit is %.0f s. It is ended.",
                        self._config.engine_name(replica).capitalize(), silent, limit,
                    )  # fmt: skip
                    await self._end(replica, member)

    async def _end(self, replica: int, member: _Member) -> None:
        self.hung |= set(range(self._config.num_engines)) if self._config.one_process else {replica}
        member.client.ignore()  # it may wake up below; what it had is for those that take over
        _send(member, signal.SIGUSR1)  # writes the stacks of its threads to the log
        _send(member, signal.SIGCONT)  # also where it was stopped, and would otherwise not come to it
        await asyncio.sleep(_STACKS_S)
        _send(member, signal.SIGKILL)
        if self._members[replica] is member:
            if self._fleet is not None and not member.client.lost:
                self._fleet.end(replica)
            self._router.drop(replica)  # an engine also ends when nobody is connected to it

    def close(self) -> None:
        self._door.close()
        self._greeters.shutdown(wait=False, cancel_futures=True)


def _hear(connection: socket.socket, key: bytes) -> tuple[Channel, Hello]:
    """In a thread: it waits for the other end."""
    channel = greet(connection, key)
    return channel, channel.receive(Hello, timeout=GREET_S)


def _send(member: _Member, number: signal.Signals) -> None:
    if member.is_local and not member.client.lost:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, number)
