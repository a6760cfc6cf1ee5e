"""Load for as long as one likes, with a rest now and then: none is lost, nothing is left behind, nobody waits longer.

    .venv/bin/python benchmarks/soak_server.py [--requests 10000 | --hours 24] [--rests 10] [--concurrency 128]

A server on a tiny model answers prompts of mixed lengths, half of them streamed, 2 % of them for more than it can give.
Some of the clients leave in the middle, half of those with a reset. Meanwhile another process asks /ping. After each
stretch the load stops: the server's own ledger must balance, no block of KV cache may be held, and its processes may
have no more memory, files and threads than after the warm-up. Exits with 1 where that does not hold, a request was
lost, or first tokens come later and later.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.checkpoints import write_llama
from tests.faults.clients import leave, read_tokens
from tests.faults.oracles import Baseline, check_oracles, look_at, outcomes, processes, take_baseline
from tests.faults.pinging import Pings, pinging, share
from tests.server.load import ABORTED, COMPLETED, LOST, Ledger, random_bodies, run_load
from tests.server.servers import RunningServer, checked, running_server

CONTEXT, VOCABULARY, MAX_TOKENS = 512, 259, 64
INVALID_SHARE, REFUSED = 0.02, "context_length_exceeded"
LEAVING_RATE = 2.0  # whoever leaves does so after half a second in the mean, which is about what an answer takes
SILENCE_S = 120.0  # without a word to anybody: who still waits then waits for ever

type Bodies = Iterable[dict]


def main() -> int:
    arguments = parse_arguments()
    os.environ.update(checked())  # for the engine, which then looks at each rest whether it has lost anything
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_llama(Path(scratch) / "model")
        log = Path(scratch) / "log"
        flags = ("--max_model_len=512", "--num_blocks=2048", "--max_decode_seqs=64", "--enable_prefix_cache_hbm")
        with running_server(folder, log, *flags, "--disable_log_requests") as server:
            wrong = run(server, arguments)
            print(log.read_text()[-2000:] if wrong else "")
    print("\n".join(wrong) or "nothing lost, nothing leaked, nobody waited longer")
    return 1 if wrong else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--requests", type=int, default=10_000, help="beside those of the warm-up")
    size.add_argument("--hours", type=float, help="of load, however many requests that are")
    parser.add_argument(
        "--rests",
        type=int,
        help="how often the load stops and the server is looked at, each time after the same part of it; "
        "without it after each hour, or each tenth of the requests",
    )
    parser.add_argument("--warm-up", type=int, default=1000, help="requests before memory, files and threads count")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--leaving", type=int, default=8, help="how many of these clients leave before the end")
    parser.add_argument(
        "--drift",
        type=float,
        default=0.1,
        help="the share by which the p99 of the time to first token may grow: the median of those of the later half of "
        "the stretches beside the median of those of the earlier half",
    )
    parser.add_argument(
        "--ping-ms", type=float, default=250, help="what the p99 of /ping in all stretches must stay below"
    )
    arguments = parser.parse_args()
    if arguments.rests is None:
        arguments.rests = max(1, round(arguments.hours)) if arguments.hours else 10
    if not 0 <= arguments.leaving < arguments.concurrency:
        parser.error("--leaving must be less than --concurrency: somebody has to stay")
    return arguments


def run(server: RunningServer, arguments: argparse.Namespace) -> list[str]:
    """What does not hold, in words."""
    bodies = mixed_bodies()
    ledger = uvloop.run(load(server, itertools.islice(bodies, arguments.warm_up), arguments))
    if wrong := at_rest(server, ledger):
        return [f"warm-up: {each}" for each in wrong]
    baseline = take_baseline(server)  # with the memory that a server needs that has something to do
    p99s, num_pings, num_late = [], 0, 0
    for number in range(1, arguments.rests + 1):
        baseline = dataclasses.replace(baseline, outcomes=outcomes(server.metrics()))
        started = time.monotonic()
        with pinging(server) as pings:
            ledger = uvloop.run(load(server, stretch_of(bodies, server, arguments), arguments))
            seconds = time.monotonic() - started
        found = at_rest(server, ledger, baseline)
        num_pings += len(pings.seconds)
        num_late += sum(1000 * each >= arguments.ping_ms for each in pings.seconds)
        if not pings.all_well:
            found.append(f"/ping was not always 200: {collections.Counter(pings.statuses)}")
        if not ledger.first_s:
            found.append("no stream was completed")
        found = [f"stretch {number}: {each}" for each in found]
        print(*found, sep="\n", end="\n" if found else "", flush=True)  # at once: the end may be a day away
        wrong += found
        if server.process.poll() is not None or not ledger.first_s:
            return wrong
        p99s.append(share(ledger.first_s, 0.99))
        print(f"stretch {number}: {figures(server, ledger, pings, seconds)}", flush=True)
    if num_late > 0.01 * num_pings:
        wrong.append(f"{num_late} of {num_pings} /ping took {arguments.ping_ms:g} ms or more, which one in 100 may")
    return wrong + drifted(p99s, arguments.drift)


def mixed_bodies() -> Iterator[dict]:
    rng = random.Random(0)
    for body in random_bodies(0, CONTEXT, VOCABULARY, MAX_TOKENS):
        yield body | {"max_tokens": 2 * CONTEXT} if rng.random() < INVALID_SHARE else body


def stretch_of(bodies: Iterator[dict], server: RunningServer, arguments: argparse.Namespace) -> Bodies:
    if not arguments.hours:
        return itertools.islice(bodies, arguments.requests // arguments.rests)
    end = time.monotonic() + 3600 * arguments.hours / arguments.rests
    # Nobody is left to ask where the server has ended, and refusals would come as fast as they can.
    return itertools.takewhile(lambda _: time.monotonic() < end and server.process.poll() is None, bodies)


async def load(server: RunningServer, bodies: Bodies, arguments: argparse.Namespace) -> Ledger:
    """Clients that stay and clients that leave take from the same bodies until there are no more."""
    ledger, left = Ledger(last_answer=time.monotonic()), iter(bodies)
    staying = run_load(server.url, left, concurrency=arguments.concurrency - arguments.leaving, ledger=ledger)
    leaving = (leave_each(server, left, ledger, random.Random(seed)) for seed in range(arguments.leaving))
    clients = asyncio.gather(staying, *leaving)
    while not (await asyncio.wait([clients], timeout=1))[0]:
        if time.monotonic() - ledger.last_answer > SILENCE_S:
            clients.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await clients
            ledger.note(LOST, f"nobody was told anything for {SILENCE_S:.0f} s, and somebody waits")
            return ledger
    clients.result()  # which raises what a client raised
    return ledger


async def leave_each(server: RunningServer, bodies: Iterator[dict], ledger: Ledger, rng: random.Random) -> None:
    """A client that leaves after some tokens, be it the last, or some time, be it before the first."""
    for body in bodies:

        async def had_enough(reader: asyncio.StreamReader, body: dict = body) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.expovariate(LEAVING_RATE)):
                    await read_tokens(reader, rng.randint(1, body["max_tokens"]))

        try:
            await leave(server.port, body | {"return_token_ids": True}, when=had_enough, reset=rng.random() < 0.5)
            ledger.note(ABORTED)
        except (OSError, AssertionError) as error:
            ledger.note(LOST, f"{type(error).__name__}: {error}")


def at_rest(server: RunningServer, ledger: Ledger, baseline: Baseline | None = None) -> list[str]:
    """What does not hold of a server that has nothing more to do."""
    wrong = []
    if lost(ledger):
        wrong.append(f"{lost(ledger)} requests were lost: {dict(ledger.outcomes)} {ledger.complaints}")
    if (code := server.process.poll()) is not None:
        return [*wrong, f"the server has ended with {code}"]
    try:
        check_oracles(server, ledger, baseline)
    except AssertionError as error:
        wrong.append(str(error))
    return wrong


def lost(ledger: Ledger) -> int:
    """All that were not answered as they had to be."""
    return ledger.total - sum(ledger.outcomes[each] for each in (COMPLETED, ABORTED, REFUSED))


def figures(server: RunningServer, ledger: Ledger, pings: Pings, seconds: float) -> str:
    p50, p99 = (1000 * share(ledger.first_s, part) for part in (0.5, 0.99))
    held = processes(server) | {"this one": look_at(os.getpid())}
    return "; ".join(
        (
            f"{ledger.total} requests in {seconds:.1f} s ({ledger.total / seconds:.0f}/s, "
            f"{ledger.tokens / seconds:.0f} tokens/s of those completed), {ledger.outcomes[ABORTED]} given up, "
            f"{ledger.outcomes[REFUSED]} refused, {lost(ledger)} lost",
            f"first token p50 {p50:.0f} ms, p99 {p99:.0f} ms",
            str(pings),
            *(
                f"{name} {each.memory_mib:.0f} MiB, {each.files} files, {each.threads} threads"
                for name, each in held.items()
            ),
        )
    )


def drifted(p99s: list[float], limit: float) -> list[str]:
    """Whether the later half of the stretches is more than this share above the earlier one, in words. By medians: a
    stretch in which the machine had something else to do says nothing.
    """
    half = len(p99s) // 2
    if not half:
        return []
    earlier, later = statistics.median(p99s[:half]), statistics.median(p99s[-half:])
    if later <= (1 + limit) * earlier:
        return []
    return [
        f"the p99 of the first token is {1000 * later:.0f} ms in the later half of the stretches, "
        f"{100 * (later / earlier - 1):.0f} % above the {1000 * earlier:.0f} ms of the earlier one; "
        f"{100 * limit:.0f} % are allowed"
    ]


if __name__ == "__main__":
    sys.exit(main())
