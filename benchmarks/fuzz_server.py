"""Mutated requests against a real server on a tiny model: how they were answered, and whether any made it fail or hang.

    .venv/bin/python -m benchmarks.fuzz_server --bodies 100000

Ends with 1 if one did. A fault is printed with its number; `--first NUMBER --bodies 1` sends that one again.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoints import write_llama
from tests.server.fuzzing import HANG_S, NUM_CONNECTIONS, Findings, fuzz
from tests.server.mutations import mutant
from tests.server.refusals import check_ledger
from tests.server.servers import running_server
from tests.server.valid_bodies import FLAGS

_MAX_SHOWN = 50


def main() -> int:
    parser = argparse.ArgumentParser(description="Sends mutated requests to a server.")
    parser.add_argument("--bodies", type=int, default=100_000, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (%(default)s)")
    parser.add_argument("--connections", type=int, default=NUM_CONNECTIONS, help="at a time (%(default)s)")
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.bodies)
    with tempfile.TemporaryDirectory(prefix="hex-llm-fuzz-") as name:
        folder = Path(name)
        with running_server(write_llama(folder / "model"), folder / "log", *FLAGS) as server:
            requests = (mutant(number, arguments.seed) for number in numbers)
            started = time.monotonic()
            findings = asyncio.run(fuzz(server.port, requests, arguments.connections))
            seconds = time.monotonic() - started
            metrics, ready = server.metrics(), server.get("/ping").status_code == 200
    print(_report(findings, metrics, seconds))
    try:
        check_ledger(metrics)
    except AssertionError:
        print("The ledger does not balance, or counts faults of ours.")
        return 1
    return 0 if ready and not findings.faults else 1


def _report(findings: Findings, metrics: dict[str, float], seconds: float) -> str:
    rows = [(f"answered {status}", count) for status, count in sorted(findings.statuses.items())]
    ledger = {name: _total(metrics, f"hexllm:requests_{name}") for name in ("received_total", "total", "in_flight")}
    rows += [
        ("5xx", findings.server_errors),
        (f"hangs (over {HANG_S:g} s)", findings.hangs),
        ("other faults", len(findings.faults) - findings.hangs - findings.server_errors),
        ("ledger: received", int(ledger["received_total"])),
        ("ledger: ended", int(ledger["total"])),
        ("ledger: in flight", int(ledger["in_flight"])),
        ("internal errors", int(metrics["hexllm:internal_errors_total"])),
    ]
    lines = [f"{findings.num_sent} mutated requests in {seconds:.0f} s, {findings.num_sent / seconds:.0f} a second"]
    lines += [f"  {name:<24}{value:>9}" for name, value in rows]
    lines.append(f"  slowest answer {findings.slowest_s:.2f} s, number {findings.slowest}")
    return "\n".join([*lines, *(f"fault: {fault}" for fault in findings.faults[:_MAX_SHOWN])])


def _total(metrics: dict[str, float], name: str) -> float:
    return sum(value for sample, value in metrics.items() if sample.partition("{")[0] == name)


if __name__ == "__main__":
    sys.exit(main())
