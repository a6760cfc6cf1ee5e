"""Ten thousand requests at once-and-again, some given up on the way: none is lost, nothing is left behind.

    .venv/bin/python benchmarks/soak_server.py [--requests 10000] [--concurrency 128]

A server on a tiny model answers prompts of mixed lengths, half of them streamed; 5 % of the clients hang up. Meanwhile
another process asks /ping. At the end the server's own ledger must balance, no block of KV cache may be held, and its
processes may not have grown. Exits with 1 where one of these does not hold.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.checkpoints import write_llama
from tests.faults.oracles import Baseline, check_oracles, memory, take_baseline
from tests.faults.pinging import pinging, share
from tests.server.load import ABORTED, COMPLETED, Ledger, random_body, run_load
from tests.server.servers import RunningServer, running_server

CONTEXT, VOCABULARY = 512, 259


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--abort-share", type=float, default=0.05)
    arguments = parser.parse_args()
    rng = random.Random(0)
    bodies = [random_body(rng, CONTEXT, VOCABULARY, 64) for _ in range(arguments.requests)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_llama(Path(scratch) / "model")
        log = Path(scratch) / "log"
        flags = ("--max_model_len=512", "--num_blocks=2048", "--max_decode_seqs=64", "--enable_prefix_cache_hbm")
        with running_server(folder, log, *flags, "--disable_log_requests") as server:
            wrong = run(server, bodies, arguments)
            print(log.read_text()[-2000:] if wrong else "")
    print("\n".join(wrong) or "nothing lost, nothing leaked")
    return 1 if wrong else 0


def run(server: RunningServer, bodies: list[dict], arguments: argparse.Namespace) -> list[str]:
    """What does not hold, in words."""
    tenth = len(bodies) // 10
    first = uvloop.run(_load(server, bodies[:tenth], arguments))
    wrong = wait_for_rest(server, first)
    baseline = take_baseline(server)  # with the memory that a server needs that has something to do
    started = time.monotonic()
    with pinging(server) as pings:
        ledger = uvloop.run(_load(server, bodies[tenth:], arguments))
        seconds = time.monotonic() - started
    wrong += wait_for_rest(server, ledger, baseline)
    print(
        f"{ledger.total} requests in {seconds:.1f} s ({ledger.total / seconds:.0f}/s, "
        f"{ledger.tokens / seconds:.0f} tokens/s of those completed): {dict(ledger.outcomes)}"
    )
    print(f"{pings}, median {1000 * share(pings.seconds, 0.5):.1f} ms, longest {1000 * max(pings.seconds):.1f} ms")
    for name, after in memory(server).items():
        print(f"{name}: {baseline.processes[name].memory_mib:.0f} MiB after a tenth, {after:.0f} MiB at the end")
    if ledger.outcomes.keys() - {COMPLETED, ABORTED} or ledger.total != len(bodies) - tenth:
        wrong.append(f"requests were lost: {ledger.complaints}")
    if not pings.all_well or share(pings.seconds, 0.99) >= 0.25:
        wrong.append("/ping was not always 200, or its 99th percentile not below 250 ms")
    return wrong


async def _load(server: RunningServer, bodies: list[dict], arguments: argparse.Namespace) -> Ledger:
    return await run_load(server.url, bodies, concurrency=arguments.concurrency, abort_share=arguments.abort_share)


def wait_for_rest(server: RunningServer, ledger: Ledger, baseline: Baseline | None = None) -> list[str]:
    try:
        check_oracles(server, ledger, baseline)
    except AssertionError as error:
        return [str(error)]
    return []


if __name__ == "__main__":
    sys.exit(main())
