"""What must hold of a server that has nothing more to do, whatever was done to it before."""

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.server.load import ABORTED, COMPLETED, LOST, UNREACHABLE, Ledger
from tests.server.servers import RunningServer

IDLE_S = 5.0  # after the last answer: until what was aborted has left the engine, and it has said so
SPARE = 2  # files and threads that may have come or gone
GROWTH_MIB = 50.0
# Threads of pools stay once they were needed, and are never more: asyncio's own (see concurrent.futures), and of those
# that bring adapters to an engine (runner/adapter_carrier).
POOL_THREADS = {"front": min(32, (os.cpu_count() or 1) + 4), "engine": 4}

_ZERO = (
    "hexllm:requests_in_flight",
    "hexllm:admitted_sequences",
    "hexllm:queue_tokens",
    "hexllm:replica_outstanding_tokens",
    'hexllm:kv_blocks{state="used"}',
    "hexllm:num_requests_running",
    "hexllm:num_requests_waiting",
    "hexllm:xla_compiles_after_ready_total",
    "hexllm:invariant_violations_total",
)
_ZERO_WHERE_THERE = (  # of adapters, and of engines of two kinds
    'hexllm:kv_blocks{state="held"}',
    'hexllm:lora_slots{state="used"}',
    "hexllm:num_loras_loading",
    "hexllm:num_requests_waiting_for_kv",
)


@dataclass(frozen=True, slots=True)
class Process:
    """What a process holds."""

    files: int
    threads: int
    memory_mib: float


@dataclass(frozen=True, slots=True)
class Baseline:
    """A server at rest. Processes are named by what they do."""

    processes: dict[str, Process]
    outcomes: Counter[str]
    blocks: int


def take_baseline(server: RunningServer) -> Baseline:
    """After a request: before its first step, the engine tells nothing of its blocks."""
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
    deadline = time.monotonic() + IDLE_S
    while broken(server) or not _num_blocks(server.metrics()):
        assert time.monotonic() < deadline, broken(server)
        time.sleep(0.1)
    metrics = server.metrics()
    return Baseline(processes(server), outcomes(metrics), _num_blocks(metrics))


def check_oracles(
    server: RunningServer,
    ledger: Ledger | None = None,
    baseline: Baseline | None = None,
    *,
    internal_errors: int = 0,
    growth_mib: float = GROWTH_MIB,
) -> None:
    """Waits for rest, then sees whether everything adds up. `ledger` is what clients had since the baseline;
    `internal_errors` is how many were injected.
    """
    deadline = time.monotonic() + IDLE_S
    while wrong := broken(server, ledger, baseline, internal_errors=internal_errors, growth_mib=growth_mib):
        assert time.monotonic() < deadline, "; ".join(wrong)
        time.sleep(0.1)


def broken(
    server: RunningServer,
    ledger: Ledger | None = None,
    baseline: Baseline | None = None,
    *,
    internal_errors: int = 0,
    growth_mib: float = GROWTH_MIB,
) -> list[str]:
    """What does not hold at this moment, in words."""
    metrics = server.metrics()
    wrong = [f"there is no {name}" for name in _ZERO if not any(_is(name, sample) for sample in metrics)]
    wrong += [f"{name} is {total:g}" for name in (*_ZERO, *_ZERO_WHERE_THERE) if (total := _total(metrics, name))]
    if (errors := metrics["hexllm:internal_errors_total"]) != internal_errors:
        wrong.append(f"{errors:g} internal errors, not {internal_errors}")
    received, ended = _total(metrics, "hexllm:requests_received_total"), outcomes(metrics)
    if received != ended.total() + metrics["hexllm:requests_in_flight"]:
        wrong.append(f"the ledger does not balance: {received:g} were received, {dict(ended)} have ended")
    if baseline is not None:
        wrong += _compare(baseline, processes(server), growth_mib)
        if _num_blocks(metrics) != baseline.blocks:
            wrong.append(f"{_num_blocks(metrics)} blocks in all, {baseline.blocks} before")
    if ledger is not None:
        wrong += _disagreements(ledger, ended - baseline.outcomes if baseline else ended)
    return wrong


def outcomes(metrics: dict[str, float]) -> Counter[str]:
    """How requests ended, by the server's count."""
    found: Counter[str] = Counter()
    for sample, value in metrics.items():
        if sample.startswith("hexllm:requests_total{"):
            found[sample.partition('outcome="')[2].partition('"')[0]] += int(value)
    return +found


def processes(server: RunningServer) -> dict[str, Process]:
    """By what they do; those that do the same are added up."""
    found: dict[str, Process] = {}
    names = {server.process.pid: "front"} | {pid: _name(line) for pid, line in server.children().items()}
    for pid, name in names.items():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            one, before = look_at(pid), found.get(name, Process(0, 0, 0))
            found[name] = Process(
                one.files + before.files, one.threads + before.threads, one.memory_mib + before.memory_mib
            )
    return found


def memory(server: RunningServer) -> dict[str, float]:
    """Resident MiB of each process."""
    return {name: process.memory_mib for name, process in processes(server).items()}


def _name(command: str) -> str:
    for part, name in (("engine_process", "engine"), ("text.process", "text"), ("server.front", "front")):
        if part in command:
            return name
    return "other"


def look_at(pid: int) -> Process:
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    resident = int(status["VmRSS"].split()[0]) / 1024 if "VmRSS" in status else 0.0
    return Process(len(list((folder / "fd").iterdir())), int(status["Threads"]), resident)


def _compare(baseline: Baseline, now: dict[str, Process], growth_mib: float) -> list[str]:
    wrong = []
    if now.keys() != baseline.processes.keys():
        wrong.append(f"the processes are {sorted(now)}, not {sorted(baseline.processes)}")
    for name in now.keys() & baseline.processes.keys():
        before, after = baseline.processes[name], now[name]
        if abs(after.files - before.files) > SPARE:
            wrong.append(f"{name} has {after.files} open files, {before.files} before")
        threads = SPARE + POOL_THREADS.get(name, 0)
        if after.threads - before.threads > threads or before.threads - after.threads > SPARE:
            wrong.append(f"{name} has {after.threads} threads, {before.threads} before")
        if after.memory_mib - before.memory_mib > max(growth_mib, 0.02 * before.memory_mib):
            wrong.append(f"{name} has {after.memory_mib:.0f} MiB, {before.memory_mib:.0f} before")
    return wrong


def _disagreements(ledger: Ledger, ended: Counter[str]) -> list[str]:
    """Where the clients and the server do not tell the same story."""
    told = ledger.outcomes
    refused = told.total() - sum(told[each] for each in (COMPLETED, ABORTED, LOST, UNREACHABLE))
    wrong = [f"{told[LOST]} requests were lost: {ledger.complaints}"] if told[LOST] else []
    # One that a client gave up on may have been answered by then, or never have come.
    for what, few, by_server in (
        ("completed", told[COMPLETED], ended["completed"]),
        ("refused or failed", refused, ended["rejected"] + ended["failed"]),
        ("cancelled", 0, ended["cancelled"]),
    ):
        if not few <= by_server <= few + told[ABORTED]:
            wrong.append(f"{by_server} {what} by the server, by clients {few} beside {told[ABORTED]} given up")
    return wrong


def _total(metrics: dict[str, float], name: str) -> float:
    return sum(value for sample, value in metrics.items() if _is(name, sample))


def _is(name: str, sample: str) -> bool:
    """Whether a sample is of the metric of this name, whatever its labels."""
    return sample == name or sample.startswith(name + "{")


def _num_blocks(metrics: dict[str, float]) -> int:
    return int(_total(metrics, "hexllm:kv_blocks"))
