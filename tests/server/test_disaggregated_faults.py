"""Engines for prompts and for answers that are killed or hang while one hands requests over to the other: every answer
is that of a server that nothing happened to, the engine comes back, and no block is left on either side."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import write_llama
from tests.faults.suite import record
from tests.server.disaggregated import checked_server, settled
from tests.server.replicas import (
    Load,
    Pings,
    engines,
    generated,
    go_on,
    run_until,
    sample,
    stop,
    wait_until_asked,
    wait_until_up,
)
from tests.server.servers import RunningServer

NUM_ASKED = 24
# A prompt takes several steps, and what it fills goes in several parts.
FLAGS = (
    "--dtype=float32",
    "--max_model_len=512",
    "--num_blocks=2048",
    "--block_size=8",
    "--max_decode_seqs=32",
    "--prefill_len_padding=64",
    "--max_num_batched_tokens=128",
    "--decode_blocks_padding=1",
    "--step_timeout_s=5",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


def bodies(salt: str) -> list[dict]:
    """Streamed and whole, greedy and drawn by seed; no two alike. With another salt they are new to all engines, and
    have the same answers."""
    return [
        {
            "prompt": [5 + number, *((7 * place + number * place) % 250 + 3 for place in range(260 + 3 * number))],
            "max_tokens": 100,
            "ignore_eos": True,
            "stream": bool(number % 2),
            "temperature": number // 2 % 2,
            "seed": number,
            "cache_salt": salt,
        }
        for number in range(NUM_ASKED)
    ]


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory) -> list[tuple[str, str]]:
    """Of one engine that does all."""
    log = tmp_path_factory.mktemp("undisturbed") / "log"
    flags = ("--enable_chunked_prefill", "--enable_prefix_cache_hbm")
    with checked_server(folder, log, *FLAGS, *flags, devices=1) as server:
        return Load(server, bodies("alone")).answers()


def serving(folder: Path, log: Path, topology: str, *flags: str) -> Iterator[RunningServer]:
    devices = sum(map(int, topology.split(",")))
    with checked_server(folder, log, *FLAGS, f"--disagg_topo={topology}", *flags, devices=devices) as server:
        yield server


@pytest.fixture(scope="module")
def one_and_one(folder, tmp_path_factory) -> Iterator[RunningServer]:
    yield from serving(folder, tmp_path_factory.mktemp("one_and_one") / "log", "1,1")


@pytest.fixture(scope="module")
def two_and_one(folder, tmp_path_factory) -> Iterator[RunningServer]:
    yield from serving(folder, tmp_path_factory.mktemp("two_and_one") / "log", "2,1")


@pytest.fixture(scope="module")
def one_and_two(folder, tmp_path_factory) -> Iterator[RunningServer]:
    yield from serving(folder, tmp_path_factory.mktemp("one_and_two") / "log", "1,2")


def hand_over(server: RunningServer, prefill: list[int], decode: list[int], salt: str) -> Load:
    """Requests of which every engine for prompts has computed some, and that wait for blocks: as many of these are on
    their way as may be. All engines are stopped.
    """
    before = generated(server)
    stop([*prefill, *decode])
    load = Load(server, bodies(salt))
    wait_until_asked(server, NUM_ASKED)
    run_until(prefill, lambda: generated(server) > before + NUM_ASKED / 2 + 1, "too few prompts were computed")
    run_until(decode, lambda: sample(server, "num_requests_waiting_for_kv"), "nobody waits for blocks")
    go_on(prefill)
    time.sleep(0.1)  # for the blocks, which nobody takes
    stop(prefill)
    return load


def decoding(server: RunningServer, prefill: list[int], decode: list[int], salt: str) -> Load:
    """Requests that have some tokens from the engines that go on with them. All engines are stopped."""
    both = [*prefill, *decode]
    for attempt in range(5):
        before = generated(server)
        stop(both)
        load = Load(server, bodies(f"{salt} {attempt}"))
        wait_until_asked(server, NUM_ASKED)
        run_until(both, lambda before=before: generated(server) > before + 4 * NUM_ASKED, "there are no tokens", 10)
        time.sleep(0.1)  # for tokens that are on their way
        if sample(server, "requests_in_flight") == NUM_ASKED:
            return load
        go_on(both)  # on a busy machine it can be long until they are stopped, and some answers are complete by then
        load.answers()
    raise AssertionError("the answers are always complete before the engines stop")


SITUATIONS = {"while it hands over": hand_over, "while it decodes": decoding}


def disturb(
    server: RunningServer, undisturbed: list, num_prefill: int, victim: int, number: int, situation: str
) -> None:
    """What happens to one of the engines, and what must come of it."""
    pids = engines(server)
    before = settled(server)
    prefill = [pid for replica, pid in pids.items() if replica < num_prefill]
    decode = [pid for replica, pid in pids.items() if replica >= num_prefill]
    replays = sample(server, "replays_total")
    restarts = sample(server, f'replica_restarts_total{{replica="{victim}"}}')
    salt = f"{victim} {number} {situation}"
    with Pings(server) as pings:
        load = SITUATIONS[situation](server, prefill, decode, salt)
        os.kill(pids[victim], number)
        go_on({*pids.values()} - {pids[victim]})
        assert load.answers() == undisturbed
        # One that was stopped wakes up to write its stacks, and may hand over all that it has before it is ended.
        assert number == signal.SIGSTOP or sample(server, "replays_total") > replays
        back = wait_until_up(server, pids)
    assert pings.codes == {200}
    assert sample(server, f'replica_restarts_total{{replica="{victim}"}}') == restarts + 1
    assert {replica for replica, pid in engines(server).items() if pid != pids[replica]} == {victim}
    middle = settled(server)
    if victim < num_prefill and number == signal.SIGKILL:
        assert middle.lost > before.lost
    assert Load(server, bodies(f"{salt} again")).answers() == undisturbed
    after = settled(server)
    assert (after.transfers - middle.transfers, after.lost) == (NUM_ASKED, middle.lost)
    name = signal.Signals(number).name
    record(
        "F29",
        f"{name} of engine {victim} {situation}: {NUM_ASKED} of {NUM_ASKED} as undisturbed, up after {back:.1f} s",
    )


def test_undisturbed_engines_of_two_kinds_answer_as_one(one_and_one, undisturbed):
    before = settled(one_and_one)
    assert Load(one_and_one, bodies("first")).answers() == undisturbed
    assert settled(one_and_one).since(before).transfers == NUM_ASKED


@pytest.mark.parametrize(
    ("victim", "number", "situation"),
    [
        (0, signal.SIGKILL, "while it hands over"),
        (1, signal.SIGKILL, "while it hands over"),
        (1, signal.SIGKILL, "while it decodes"),
        pytest.param(0, signal.SIGSTOP, "while it hands over", marks=pytest.mark.slow),
    ],
)
def test_the_only_engine_of_a_kind_goes_and_the_other_kind_does_all(
    one_and_one, undisturbed, victim, number, situation
):
    disturb(one_and_one, undisturbed, 1, victim, number, situation)


@pytest.mark.slow
def test_another_engine_for_prompts_takes_over(two_and_one, undisturbed):
    disturb(two_and_one, undisturbed, 2, 1, signal.SIGKILL, "while it hands over")


@pytest.mark.parametrize("situation", ["while it hands over", pytest.param("while it decodes", marks=pytest.mark.slow)])
def test_another_engine_for_answers_takes_over(one_and_two, undisturbed, situation):
    disturb(one_and_two, undisturbed, 1, 2, signal.SIGKILL, situation)


@pytest.mark.slow
def test_several_http_processes_lose_nothing_with_an_engine(folder, undisturbed, tmp_path):
    with checked_server(
        folder, tmp_path / "log", *FLAGS, "--disagg_topo=1,1", "--api_server_count=2", devices=2
    ) as server:
        for victim in (1, 0):
            load = Load(server, bodies(f"victim {victim}"))
            time.sleep(0.5)
            os.kill(engines(server)[victim], signal.SIGKILL)
            assert load.answers() == undisturbed
            # Both HTTP processes are asked by this, mostly: each request is a connection of its own.
            while not all(wait_until_up(server) < 0.5 for _ in range(8)):
                pass
        before = settled(server)
        assert Load(server, bodies("again")).answers() == undisturbed
        assert settled(server).since(before).transfers == NUM_ASKED
