"""Ten thousand requests at once-and-again, some given up on the way: none is lost, nothing is left behind.

    .venv/bin/python benchmarks/soak_server.py [--requests 10000] [--concurrency 128]

A server on a tiny model answers prompts of mixed lengths, half of them streamed; 5 % of the clients hang up. Meanwhile
another process asks /ping. At the end the server's own ledger must balance, no block of KV cache may be held, and its
processes may not have grown. Exits with 1 where one of these does not hold.
"""

import argparse
import collections
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.checkpoints import write_llama
from tests.server.load import ABORTED, COMPLETED, Ledger, random_body, run_load
from tests.server.servers import RunningServer, running_server

CONTEXT, VOCABULARY = 512, 259
PING = """
import http.client, sys, time
while True:
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
    connection.request("GET", "/ping")
    status = connection.getresponse().status
    connection.close()
    print(status, time.perf_counter() - started, flush=True)
    time.sleep(0.05)
"""


def memory(server: RunningServer) -> dict[str, float]:
    """Resident MiB by process."""
    pids = {server.process.pid: "front", **{pid: name(line) for pid, line in server.children().items()}}
    return {label: _resident(pid) for pid, label in pids.items()}


def name(line: str) -> str:
    return "engine" if "engine_process" in line else "text" if "text.process" in line else "other"


def _resident(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))


def check_ledger(server: RunningServer, ledger: Ledger) -> list[str]:
    """What does not add up, in words."""
    metrics = server.metrics()
    outcomes: collections.Counter[str] = collections.Counter()
    for sample, value in metrics.items():
        if sample.startswith("hexllm:requests_total{"):
            outcomes[sample.partition('outcome="')[2].partition('"')[0]] += int(value)
    received = sum(value for sample, value in metrics.items() if sample.startswith("hexllm:requests_received_total"))
    print(f"server: received {received:.0f}, {dict(outcomes)}; clients: {dict(ledger.outcomes)}")
    wrong = []
    if received != outcomes.total() + metrics["hexllm:requests_in_flight"]:
        wrong.append("the ledger does not balance")
    if outcomes.keys() - {"completed", "cancelled"} or outcomes["cancelled"] > ledger.outcomes[ABORTED]:
        wrong.append("a request ended in another way than it should")
    for sample in (
        "hexllm:requests_in_flight",
        'hexllm:kv_blocks{state="used"}',
        "hexllm:admitted_sequences",
        "hexllm:queue_tokens",
        "hexllm:internal_errors_total",
        "hexllm:xla_compiles_after_ready_total",
    ):
        if metrics[sample] != 0:
            wrong += [f"{sample} is {metrics[sample]}"]
    return wrong


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
    ping = subprocess.Popen([sys.executable, "-c", PING, str(server.port)], stdout=subprocess.PIPE, text=True)
    samples: list[tuple[float, dict[str, float]]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(1):
            samples.append((server.metrics()["hexllm:generation_tokens_total" + label], memory(server)))

    label = next(
        n.removeprefix("hexllm:generation_tokens_total") for n in server.metrics() if "generation_tokens_total" in n
    )
    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    ledger = uvloop.run(
        run_load(server.url, bodies, concurrency=arguments.concurrency, abort_share=arguments.abort_share)
    )
    seconds = time.monotonic() - started
    stop.set()
    watcher.join()
    time.sleep(2)  # until what was aborted last has left the engine, and it has said so
    ping.terminate()
    pings = [line.split() for line in ping.communicate()[0].splitlines()]
    times = sorted(1000 * float(each[1]) for each in pings)
    wrong = check_ledger(server, ledger)
    print(
        f"{ledger.total} requests in {seconds:.1f} s ({ledger.total / seconds:.0f}/s, "
        f"{ledger.tokens / seconds:.0f} tokens/s of those completed)"
    )
    print(
        f"/ping: {len(times)} times, median {statistics.median(times):.1f} ms, "
        f"p99 {times[int(0.99 * len(times))]:.1f} ms, longest {times[-1]:.1f} ms"
    )
    if ledger.outcomes.keys() - {COMPLETED, ABORTED} or ledger.total != len(bodies):
        wrong.append(f"requests were lost: {ledger.complaints}")
    if any(status != "200" for status, _ in pings) or times[int(0.99 * len(times))] >= 250:
        wrong.append("/ping was not always 200, or its 99th percentile not below 250 ms")
    early, late = samples[len(samples) // 10][1], memory(server)
    for process, before in early.items():
        print(f"{process}: {before:.0f} MiB after a tenth, {late[process]:.0f} MiB at the end")
        if late[process] - before > max(50, 0.02 * before):
            wrong.append(f"{process} grew")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
