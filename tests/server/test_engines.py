"""How an HTTP process lets engines in, and how it ends those that fall silent."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hex_llm.channel import Channel, address_of, call, listen
from hex_llm.config import Config
from hex_llm.engine.request import FinishReason
from hex_llm.engine.router import Router
from hex_llm.engine.wire import Abort, Hello, Ready
from hex_llm.frames import encode
from hex_llm.launch.fleet import Fleet
from hex_llm.process import machine
from hex_llm.seal import Numbering
from hex_llm.server import engines as engines_module
from hex_llm.server.engines import Engines
from tests.engine.fakes import make_limits

KEY = b"a key"
READY = Ready(make_limits(), "float32", "a device")
CONFIG = Config(data_parallel_size=2, step_timeout_s=0.4, compile_timeout_s=0.4)
TWO_KINDS = Config(disagg_topo="1,1", step_timeout_s=0.4, compile_timeout_s=0.4)


class Door:
    """An HTTP process's engines, and what a test has connected to them."""

    def __init__(self, listener: socket.socket, config: Config):
        self.address = address_of(listener)
        self.router = Router(2)
        self.ended: list[int] = []
        fleet = cast(Fleet, SimpleNamespace(end=self.ended.append))
        self.engines = Engines(config, self.router, listener, KEY, fleet)

    async def connect(self, hello: Hello, key: bytes = KEY) -> Channel:
        channel = await asyncio.to_thread(call, self.address, key, timeout=5)
        channel.send(hello)
        return channel

    async def wait_for(self, condition) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def door(address: str, config: Config = CONFIG) -> AsyncIterator[Door]:
    here = Door(listen(address), config)
    jobs = [asyncio.create_task(each) for each in (here.engines.let_in(), here.engines.watch())]
    try:
        yield here
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        here.engines.close()
        here.router.close()


@pytest.fixture(params=["unix", "tcp"])
def address(request, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/door" if request.param == "unix" else "tcp:127.0.0.1:0"


def hello(replica: int, pid: int = 1) -> Hello:
    return Hello(replica, pid, "another machine")


def is_closed(channel: Channel) -> bool:
    channel.socket.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        return channel.socket.recv(1) == b""
    return True


def test_engines_are_let_in_by_the_replica_that_they_say_they_are(address):
    async def main():
        async with door(address) as here:
            for replica in (1, 0):
                channel = await here.connect(hello(replica))
                channel.send(READY)
                await here.wait_for(lambda replica=replica: here.router.replicas[replica].is_up)
            assert here.router.ready.done()
            assert [each.num_joined for each in here.router.replicas] == [1, 1]

    asyncio.run(main())


def test_a_replica_that_comes_back_takes_the_place_of_the_one_before(address):
    async def main():
        async with door(address) as here:
            first = await here.connect(hello(0))
            first.send(READY)
            await here.wait_for(lambda: here.router.replicas[0].is_up)
            other = await here.connect(hello(1))
            other.send(READY)
            await here.wait_for(here.router.ready.done)
            second = await here.connect(hello(0))
            assert await asyncio.to_thread(is_closed, first)
            await here.wait_for(lambda: here.router.replicas[0].num_joined == 2)
            assert not here.router.replicas[0].is_up
            second.send(READY)
            await here.wait_for(lambda: here.router.replicas[0].is_up)
            assert not here.router.lost.is_set()

    asyncio.run(main())


@pytest.mark.parametrize(
    "says",
    [
        encode(hello(2), Numbering()),
        encode(hello(-1), Numbering()),
        encode(Abort([], FinishReason.ABORT), Numbering()),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
    ],
    ids=["no such replica", "no replica", "no hello", "http", "a length"],
)
def test_who_is_no_engine_of_this_server_is_turned_away_and_engines_are_not(tmp_path, says, caplog):
    async def main():
        async with door(f"unix:{tmp_path}/door") as here:
            stranger = await asyncio.to_thread(call, here.address, b"")
            stranger.socket.sendall(says)
            assert await asyncio.to_thread(is_closed, stranger)
            engine = await here.connect(hello(0))
            engine.send(READY)
            await here.wait_for(lambda: here.router.replicas[0].is_up)

    asyncio.run(main())
    assert "turned away" in caplog.text


def test_over_a_network_an_engine_must_have_the_key(caplog):
    async def main():
        async with door("tcp:127.0.0.1:0") as here:
            with pytest.raises(Exception, match=r"HEXLLM_CLUSTER_KEY|ended before"):
                await here.connect(hello(0), key=b"another key")
            await here.wait_for(lambda: "turned away" in caplog.text)
            assert here.router.replicas[0].client is None

    asyncio.run(main())


def test_who_connects_and_says_nothing_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(engines_module, "GREET_S", 0.3)

    async def main():
        async with door(f"unix:{tmp_path}/door") as here:
            silent = [await asyncio.to_thread(call, here.address, b"") for _ in range(20)]
            started = time.monotonic()
            engine = await here.connect(hello(0))
            engine.send(READY)
            await here.wait_for(lambda: here.router.replicas[0].is_up)
            assert time.monotonic() - started < 5  # one after the other they would be given 6 s
            for each in silent:
                assert await asyncio.to_thread(is_closed, each)

    asyncio.run(main())


@pytest.mark.parametrize("here_too", [True, False], ids=["of this machine", "of another machine"])
def test_an_engine_that_falls_silent_is_ended_wherever_it_is(tmp_path, monkeypatch, here_too):
    sent = []
    monkeypatch.setattr(engines_module, "_STACKS_S", 0.05)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))

    async def main():
        async with door(f"unix:{tmp_path}/door") as here:
            silent = await here.connect(Hello(1, 4321, machine() if here_too else "another machine"))
            lively = await here.connect(Hello(0, 1234, machine()))
            for each in (silent, lively):
                each.send(READY)
            await here.wait_for(here.router.ready.done)
            started = time.monotonic()
            while here.router.replicas[1].client is not None:
                lively.send(READY)
                await asyncio.sleep(0.05)
                assert time.monotonic() - started < 20
            assert await asyncio.to_thread(is_closed_after_all, silent)
            assert here.engines.hung == {1}
            assert here.ended == [1]
            assert here.router.replicas[0].is_up

    asyncio.run(main())
    assert sent == ([(4321, number) for number in (signal.SIGUSR1, signal.SIGCONT, signal.SIGKILL)] if here_too else [])


def test_an_engine_of_a_kind_is_let_in_by_its_number_and_named_by_its_kind(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(engines_module, "_STACKS_S", 0.05)

    async def main():
        async with door(f"unix:{tmp_path}/door", TWO_KINDS) as here:
            engines = [await here.connect(hello(number)) for number in (0, 1)]
            for number, engine in enumerate(engines):
                engine.send(READY)
                await here.wait_for(lambda number=number: here.router.replicas[number].is_up)
            await here.wait_for(lambda: {*here.ended} == {0, 1})
            stranger = await here.connect(hello(2))
            assert await asyncio.to_thread(is_closed, stranger)

    asyncio.run(main())
    for name in ("Prefill 0", "Decode 0"):
        assert f"{name} has given no sign of life" in caplog.text


def is_closed_after_all(channel: Channel) -> bool:
    """Whatever was said before."""
    channel.socket.settimeout(5)
    while channel.socket.recv(1000):
        pass
    return True
