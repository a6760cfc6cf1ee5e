"""Parts that fail on purpose in a server under load: whoever is not concerned gets the very answer that it gets where
nothing fails.
"""

import asyncio
import collections
import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hex_llm import faults
from hex_llm.engine.scheduler import MOST_PREEMPTIONS
from tests.faults.answers import answers, answers_of, bodies, ledger_of
from tests.faults.crowd import crowding
from tests.faults.oracles import check_oracles, take_baseline
from tests.faults.suite import record, sized
from tests.server.load import ABORTED, COMPLETED, Ledger, run_load
from tests.server.servers import RunningServer, running_server

COUNT = sized(150, 10_000)
CONCURRENCY = sized(32, 128)
FLAGS = ("--enable_prefix_cache_hbm", "--disable_log_requests", f"--max_queued_requests={4 * CONCURRENCY}")


@pytest.fixture(scope="module")
def asked() -> list[dict]:
    return bodies(COUNT)


@pytest.fixture(scope="module")
def clean(folder, tmp_path_factory) -> Iterator[RunningServer]:
    """A server in which nothing fails."""
    with running_server(folder, tmp_path_factory.mktemp("log") / "log", *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(clean, asked) -> list[str]:
    found = answers(clean, asked, concurrency=CONCURRENCY)
    check_oracles(clean)
    assert all(each.startswith("[") for each in found)
    return found


def failing(folder: Path, log: Path, what: str, *flags: str, **options):
    return running_server(folder, log, *FLAGS, *flags, **{faults.VARIABLE: what}, **options)


def errors(found: list[str]) -> collections.Counter[str]:
    return collections.Counter(each for each in found if not each.startswith("["))


def differing(found: list[str], expected: list[str]) -> int:
    """Of those that were answered."""
    return sum(one != other for one, other in zip(found, expected, strict=True) if one.startswith("["))


def preemptions(server: RunningServer) -> float:
    return sum(value for name, value in server.metrics().items() if "num_preemptions_total" in name)


@contextlib.contextmanager
def watched_tokens(server: RunningServer) -> Iterator[list[float]]:
    """For how long there was none, each time that somebody looked."""
    waits, done = [0.0], threading.Event()

    def watch() -> None:
        number, since = -1.0, time.monotonic()
        while not done.wait(0.1):
            found = sum(value for name, value in server.metrics().items() if "generation_tokens_total" in name)
            if found != number:
                number, since = found, time.monotonic()
            waits.append(time.monotonic() - since)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield waits
    finally:
        done.set()
        watcher.join()


def test_an_error_in_one_request_is_that_requests_alone(folder, clean, asked, undisturbed, tmp_path):
    """F3, F18: a text job that fails, a row without a usable number."""
    what = "text.job:raise@0.05,engine.row:nan@0.002"
    words = [body | {"prompt": "one two three four", "seed": 1} for body in asked]
    with failing(folder, tmp_path / "log", what) as server:
        baseline = take_baseline(server)
        found = answers(server, asked, concurrency=CONCURRENCY)
        bad = errors(found)
        nan_rows = server.metrics()["hexllm:nan_rows_total"]
        assert bad.keys() == {"error:numerical_error"}  # prompts of tokens are no text jobs
        assert bad.total() <= nan_rows  # of a request for several answers, more than one may be hit
        assert differing(found, undisturbed) == 0
        of_words = answers(server, words, concurrency=CONCURRENCY)
        assert differing(of_words, answers(clean, words, concurrency=CONCURRENCY)) == 0
        assert errors(of_words).keys() <= {"error:internal_error", "error:numerical_error"}
        assert errors(of_words)["error:internal_error"] >= 0.02 * len(words)
        injected = errors(of_words)["error:internal_error"]
        assert injected == (tmp_path / "log").read_text().count("wants text.job to fail here")
        check_oracles(server, ledger_of(found + of_words), baseline, internal_errors=injected)
    num_failed = bad.total() + errors(of_words).total()
    record("F3", f"{num_failed} of {2 * COUNT} failed, all with 500; the others' answers are those of a clean run")
    record("F18", f"{bad.total()} of {COUNT} requests failed for {nan_rows:.0f} rows of NaN; the others identical")


def test_a_text_process_that_is_killed_again_and_again_costs_nobody_an_answer(folder, clean, tmp_path):
    """F3: each that takes its place is killed with its fifth text in hand."""
    words = [{"prompt": f"number {number}", "max_tokens": 8, "temperature": 0} for number in range(sized(12, 100))]
    with failing(folder, tmp_path / "log", "text.job:kill@5") as server:
        found = answers(server, words, concurrency=4)
        check_oracles(server, ledger_of(found))
    killed = (tmp_path / "log").read_text().count("The text process has ended (-9); another one is started.")
    assert killed >= len(words) // 5
    assert found == answers(clean, words, concurrency=4)
    record("F3", f"the text process killed {killed} times in {len(words)} texts: 0 lost, all identical")


@pytest.mark.slow  # as long as a text may take
def test_a_text_process_that_is_stuck_costs_one_answer(folder, clean, tmp_path):
    """F3: it is killed, and what lies behind the text that it is stuck in is done by another."""
    words = [{"prompt": f"number {number}", "max_tokens": 8, "temperature": 0} for number in range(8)]
    with failing(folder, tmp_path / "log", "text.job:sleep3600@6") as server:
        found = answers(server, words, concurrency=4)
        check_oracles(server, ledger_of(found))
    assert errors(found).total() == 1, errors(found)
    assert differing(found, answers(clean, words, concurrency=4)) == 0
    assert "is stuck in a job" in (tmp_path / "log").read_text()
    record("F3", f"a text process stuck in one of {len(words)} texts: that one refused, the others identical")


@pytest.mark.parametrize(
    "point",
    [
        "device.weights:oom",
        "device.kv:oom",
        "device.program:oom",
        *sized([], [f"device.program:oom@{n}-" for n in range(2, 11)]),  # all that there are
    ],
)
def test_a_start_without_memory_ends_with_the_sums(folder, tmp_path, point):
    """F9."""
    started, statuses = time.monotonic(), set()
    with failing(folder, tmp_path / "log", point, ready=False) as server:
        while (code := server.process.poll()) is None:
            assert time.monotonic() < started + 120
            with contextlib.suppress(httpx.TransportError):
                statuses.add(server.get("/ping").status_code)
            time.sleep(0.05)
    log = (tmp_path / "log").read_text()
    assert code == 4, log
    assert statuses <= {503}
    assert "RESOURCE_EXHAUSTED" in log
    assert ("one KV block" in log) == (not point.startswith("device.program"))
    took = time.monotonic() - started
    assert took < sized(60, 10)
    record("F9", f"{point}: exit {code} after {took:.1f} s from the start")


def test_a_program_without_memory_while_it_is_planned_is_planned_beside_fewer_blocks(folder, clean, tmp_path):
    """F9: before anything is allocated that is no end yet."""
    asked = {"prompt": [5] * 20, "max_tokens": 8, "temperature": 0}
    with failing(folder, tmp_path / "log", "device.program:oom@1") as server:
        assert answers(server, [asked], concurrency=1) == answers(clean, [asked], concurrency=1)
        check_oracles(server)


def test_a_step_that_finds_no_memory_loses_nobody(folder, asked, undisturbed, tmp_path):
    """F10: in the middle of the load, when the cache was given to the step."""
    with failing(folder, tmp_path / "log", f"device.step:oom@{sized(40, 500)}") as server:
        baseline = take_baseline(server)
        found = answers(server, asked, concurrency=CONCURRENCY)
        metrics = server.metrics()
        check_oracles(server, ledger_of(found), baseline)
    assert errors(found) == {}
    assert differing(found, undisturbed) == 0
    assert sum(value for name, value in metrics.items() if "device_oom_total" in name) == 1
    record("F10", f"{COUNT} requests, 0 lost, 0 leaked blocks, every answer that of a clean run")


@pytest.mark.parametrize(("what", "code"), [("device.step:oom@40-41", 4), ("engine.step:raise@60", 70)])
def test_a_step_that_fails_for_good_ends_the_server_and_everybody_is_told(folder, asked, tmp_path, what, code):
    with failing(folder, tmp_path / "log", what) as server:
        found = answers(server, asked[:100], concurrency=32)
        assert server.process.wait(15) == code
    assert errors(found)["error:engine_dead"] > 0
    # Who came later found nobody.
    assert not {each for each in errors(found) if each != "error:engine_dead" and "cannot be reached" not in each}
    if code == 4:
        record("F10", "a second time within ten minutes: exit 4, everybody told")


def test_clients_that_leave_cost_the_others_nothing(clean, asked, undisturbed):
    """F11: beside those that stay."""
    leaving = bodies(COUNT // 10, seed=1)
    baseline = take_baseline(clean)

    async def both() -> tuple[list[str], Ledger]:
        return await asyncio.gather(
            answers_of(clean, asked, concurrency=CONCURRENCY),
            run_load(clean.url, leaving, concurrency=CONCURRENCY // 8, abort_share=1.0),
        )

    found, ledger = asyncio.run(both())
    check_oracles(clean, ledger + ledger_of(found), baseline)
    assert errors(found) == {}
    assert differing(found, undisturbed) == 0
    assert ledger.outcomes.keys() <= {ABORTED, COMPLETED}
    left = ledger.outcomes[ABORTED]
    assert left > len(leaving) / 4
    record("F11", f"{COUNT:,} requests beside {left:,} whose clients left: 0 lost, 0 leaked blocks, all identical")


@pytest.mark.parametrize(
    ("what", "count", "tokens"),
    [("", sized(20, 256), sized(120, 200)), ("engine.preempt:now@0.1", sized(20, 10_000), 60)],
    ids=["memory", "forced"],
)
def test_requests_that_give_way_get_the_answers_that_they_get_alone(folder, clean, tmp_path, what, count, tokens):
    """F16: KV cache for one and a half of the longest requests."""
    kinds = [
        {"prompt": [3 + number % 200, 7, number], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        for number in range(3, 203)
    ]
    alone = answers(clean, kinds[:count], concurrency=16)
    small = (
        "--num_blocks=48",
        "--max_decode_seqs=8",
        f"--max_queued_requests={count}",
        "--queue_timeout_s=3600",
        "--no-disable_log_requests",
    )
    asked = [kinds[number % len(alone)] for number in range(count)]
    with failing(folder, tmp_path / "log", what, *small) as server:
        baseline = take_baseline(server)
        with watched_tokens(server) as waits:
            found = answers(server, asked, concurrency=min(count, 256))
        given_way = preemptions(server)
        check_oracles(server, ledger_of(found), baseline)
    most = max(int(times) for times in re.findall(r" preempted=(\d+) ", (tmp_path / "log").read_text()))
    assert errors(found) == {}
    assert differing(found, [alone[number % len(alone)] for number in range(count)]) == 0
    assert given_way > 0
    assert most <= MOST_PREEMPTIONS
    assert max(waits) < 5 * crowding()
    how = "also forced, " if what else ""
    record(
        "F16",
        f"{how}{count:,} requests, {given_way:,.0f} times one gave way, none more than {most} times, never "
        f"{max(waits) + 0.1:.1f} s without a token: 0 lost, 0 leaked blocks, all identical",
    )


def test_a_message_that_is_lost_costs_nobody_an_answer_where_there_are_two_engines(
    folder, asked, undisturbed, tmp_path
):
    """F28: the HTTP process misses it with the next, gives that connection up, and the other engine takes over."""
    devices = {"JAX_NUM_CPU_DEVICES": "2"}
    with failing(folder, tmp_path / "log", "frames.read:drop@150", "--data_parallel_size=2", **devices) as server:
        found = answers(server, asked[:100], concurrency=16)
        check_oracles(server, ledger_of(found))
        log = (tmp_path / "log").read_text()
    assert errors(found) == {}
    assert differing(found, undisturbed[:100]) == 0
    assert "one before it has been lost" in log
    record("F28", "a message dropped between an engine and the HTTP process: 100 requests, 0 lost, all identical")


def test_a_fault_is_refused_where_the_server_has_users(folder, tmp_path):
    """Or may have: of several hosts, one that follows does not know."""
    hosts = ("--num_hosts=2", "--coordinator_address=127.0.0.1:1")
    for number, (flags, words) in enumerate(
        [
            ({"keys": ["secret"]}, "and so are API keys"),
            ({"flags": ("--host=0.0.0.0",)}, "can be reached from elsewhere"),
            ({"flags": (*hosts, "--host_rank=0")}, "faults on purpose are for one host"),
            ({"flags": (*hosts, "--host_rank=1")}, "faults on purpose are for one host"),
            ({"what": "engine.step:explode"}, "not 'explode'"),
            ({"what": "engine.step:sleepinf"}, "its seconds, 0 or more"),
        ]
    ):
        log = tmp_path / f"log{number}"
        what = flags.pop("what", "engine.step:raise@1")
        with failing(folder, log, what, *flags.pop("flags", ()), ready=False, **flags) as server:
            assert server.process.wait(20) == 2
        assert words in log.read_text()
