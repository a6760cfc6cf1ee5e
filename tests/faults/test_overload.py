"""F13 and F14: more than the server can do. What is too much is refused at once, and what is taken is done."""

import asyncio
import itertools
import socket
import time
from dataclasses import dataclass, field

import orjson

from hex_llm.bench.http_client import HttpClient
from tests.faults.accelerator import AS_ON_AN_ACCELERATOR, IN_WORDS
from tests.faults.clients import Times, stream, time_to_first_token
from tests.faults.oracles import check_oracles, take_baseline
from tests.faults.pinging import pinging, share
from tests.faults.suite import record, sized
from tests.server.load import COMPLETED, Ledger, run_load
from tests.server.servers import RunningServer, running_server

RUNNING, WAITING = 16, 32
PEAK_S, OVERLOAD_S = sized((3, 4), (20, 60))
QUEUE_S = 60
CALM_S = sized(1, 10)
BODY = {"prompt": [5] * 20, "max_tokens": 40}
REFUSABLE = BODY | {"stream": True, "ignore_eos": True}
REFUSAL_S = sized(0.5, 0.05)  # CI has other tests on its two cores

AT_ONCE = sized(300, 1280)
IDLE = sized(300, 4096)
PING_S = sized(3.0, 0.25)


@dataclass
class Overload:
    """What became of many requests: of those taken, when the first token came; how soon the others were refused."""

    times: Times = field(default_factory=Times)
    ledger: Ledger = field(default_factory=Ledger)
    refused_s: list[float] = field(default_factory=list)
    in_time: int = 0  # that were completed before the load ended


async def peak(server: RunningServer, seconds: float) -> float:
    """Requests a second, where as many come as run."""
    client, done = HttpClient(server.url, {}), Overload()
    end = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < end:
            await stream(client, BODY, done.times, done.ledger)

    started = time.monotonic()
    await asyncio.gather(*(one() for _ in range(RUNNING)))
    client.close()
    return done.ledger.outcomes[COMPLETED] / (time.monotonic() - started)


async def overload(server: RunningServer, rate: float, seconds: float) -> Overload:
    """So many requests a second, whatever becomes of those before."""
    done = Overload()
    client = HttpClient(server.url, {})
    end = time.monotonic() + seconds

    async def one() -> None:
        started = time.perf_counter()
        async with client.request("POST", "/v1/completions", orjson.dumps(REFUSABLE)) as response:
            if response.status != 200:
                error = orjson.loads(await response.read_all())["error"]
                done.refused_s.append(time.perf_counter() - started)
                assert (response.status, error["code"]) == (429, "server_overloaded")
                assert int(response.headers["retry-after"]) >= 1
                done.ledger.note(error["code"])
                return
            first = await response.read()
            done.times.first_s.append(time.perf_counter() - started)
            assert (first + await response.read_all()).endswith(b"data: [DONE]\n\n")
        done.ledger.note(COMPLETED)
        done.in_time += time.monotonic() < end

    tasks, started = [], time.monotonic()
    for number in itertools.count():
        due = started + number / rate
        if due >= end:
            break
        await asyncio.sleep(max(due - time.monotonic(), 0))
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    client.close()
    return done


def test_ten_times_too_much_is_refused_at_once_and_the_rest_done_as_fast_as_ever(folder, tmp_path):
    flags = (
        f"--max_decode_seqs={RUNNING}",
        f"--max_queued_requests={WAITING}",
        f"--queue_timeout_s={QUEUE_S}",
        "--disable_log_requests",
    )
    with running_server(folder, tmp_path / "log", *flags, **AS_ON_AN_ACCELERATOR) as server:
        before = asyncio.run(time_to_first_token(server))
        best = asyncio.run(peak(server, PEAK_S))
        baseline = take_baseline(server)
        with pinging(server) as pings:
            done = asyncio.run(overload(server, 10 * best, OVERLOAD_S))
        goodput = done.in_time / OVERLOAD_S
        check_oracles(server, done.ledger, baseline)
        time.sleep(CALM_S)
        after = asyncio.run(time_to_first_token(server))
    assert done.ledger.outcomes.keys() == {COMPLETED, "server_overloaded"}
    assert len(done.refused_s) > sized(2, 5) * done.ledger.outcomes[COMPLETED]
    assert goodput > sized(0.4, 0.9) * best
    assert share(done.refused_s, 0.99) < REFUSAL_S
    assert share(done.times.first_s, 0.99) < QUEUE_S
    assert pings.all_well
    assert after < sized(3.0, 1.2) * before
    record(
        "F13",
        f"{done.ledger.total:,} requests in {OVERLOAD_S} s, ten times what can be served {IN_WORDS}: "
        f"{goodput:.1f} completed a second, {best:.1f} without overload; {len(done.refused_s):,} refused with 429 in "
        f"{1000 * share(done.refused_s, 0.5):.0f} ms (p99 {1000 * share(done.refused_s, 0.99):.0f} ms, "
        f"the slowest {1000 * max(done.refused_s):.0f} ms); first token of "
        f"those taken p99 {share(done.times.first_s, 0.99):.1f} s; {pings}; first token before {1000 * before:.0f} ms, "
        f"afterwards {1000 * after:.0f} ms",
    )


def test_many_requests_at_once_beside_idle_connections_are_all_answered(folder, tmp_path):
    flags = (
        f"--max_queued_requests={AT_ONCE}",
        f"--max_connections={AT_ONCE + IDLE + 100}",
        "--head_timeout_s=300",  # so that those who say nothing stay
        "--queue_timeout_s=300",
        "--disable_log_requests",
    )
    with running_server(folder, tmp_path / "log", *flags, **AS_ON_AN_ACCELERATOR) as server:
        baseline = take_baseline(server)
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(IDLE)]
        bodies = [
            {"prompt": [5 + number % 200] * 10, "max_tokens": 16, "ignore_eos": True, "stream": bool(number % 2)}
            for number in range(AT_ONCE)
        ]
        with pinging(server) as pings:
            time.sleep(1)  # with nothing but them
            started = time.monotonic()
            ledger = asyncio.run(run_load(server.url, bodies, concurrency=AT_ONCE))
            seconds = time.monotonic() - started
        dropped = sum(_is_closed(client) for client in idle)
        for client in idle:
            client.close()
        check_oracles(server, ledger, baseline, growth_mib=sized(50, 100))
    assert ledger.outcomes == {COMPLETED: AT_ONCE}, ledger.complaints
    assert dropped == 0
    assert pings.all_well
    assert share(pings.seconds, 0.99) < PING_S
    record(
        "F14",
        f"{AT_ONCE:,} requests at once beside {IDLE:,} idle connections, {IN_WORDS}: all completed, in "
        f"{seconds:.1f} s, 0 resets, {pings}",
    )


def _is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
