"""F15 and F17: prompts that are too large. They are refused soon, and those who are served hardly notice."""

import asyncio
import time
from collections import Counter

import orjson

from hex_llm.bench.http_client import HttpClient
from tests.faults.accelerator import AS_ON_AN_ACCELERATOR, IN_WORDS
from tests.faults.clients import Times, stream_for
from tests.faults.oracles import check_oracles, take_baseline
from tests.faults.pinging import pinging, share
from tests.faults.suite import record, sized
from tests.server.load import COMPLETED, Ledger
from tests.server.servers import RunningServer, running_server

SECONDS = sized(4, 30)
LARGE = sized(4, 32)  # clients, of which a third send 8 MB each
STREAMS = 4
PAUSE_S = 1.0  # of each, between a refusal and the next: to read 8 MB takes the server 30 ms of a core
REFUSAL_S, PING_S, GAPS = sized((10.0, 2.0, 100), (2.0, 0.25, 2))  # CI has other tests on its two cores


def large_requests() -> list[tuple[str, bytes]]:
    """Words, one word, and as a chat; the first has 8 MB, the others one."""
    words, word = "hello big world " * 500_000, "a" * 1_000_000
    return [
        ("/v1/completions", orjson.dumps({"prompt": words, "max_tokens": 4})),
        ("/v1/completions", orjson.dumps({"prompt": word, "max_tokens": 4})),
        ("/v1/chat/completions", orjson.dumps({"messages": [{"role": "user", "content": word}], "max_tokens": 4})),
    ]


async def send_large(server: RunningServer, seconds: float) -> list[tuple[int, float]]:
    """The statuses, and how soon they came."""
    answers: list[tuple[int, float]] = []
    client = HttpClient(server.url, {})
    requests = large_requests()
    end = time.monotonic() + seconds

    async def one(number: int) -> None:
        while time.monotonic() < end:
            started = time.monotonic()
            async with client.request("POST", *requests[number % len(requests)]) as response:
                error = orjson.loads(await response.read_all())["error"]
            assert error["code"] in ("context_length_exceeded", "content_too_large"), error
            answers.append((response.status, time.monotonic() - started))
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(one(number) for number in range(LARGE)))
    client.close()
    return answers


def test_prompts_of_megabytes_are_refused_while_streams_go_on(folder, tmp_path):
    with running_server(folder, tmp_path / "log", "--disable_log_requests", **AS_ON_AN_ACCELERATOR) as server:
        alone, _ = asyncio.run(stream_for(server, SECONDS / 2, STREAMS))
        asyncio.run(send_large(server, 0.1))  # memory for bodies is taken once, and kept
        baseline = take_baseline(server)

        async def both() -> tuple[tuple[Times, Ledger], list[tuple[int, float]]]:
            return await asyncio.gather(stream_for(server, SECONDS, STREAMS), send_large(server, SECONDS))

        with pinging(server) as pings:
            (beside, ledger), answers = asyncio.run(both())
        refusals = Counter({"refused": len(answers)})
        check_oracles(server, ledger + Ledger(refusals), baseline, growth_mib=300)
    refused = [seconds for _, seconds in answers]
    assert {status for status, _ in answers} <= {400, 413}
    assert max(refused) < REFUSAL_S
    assert ledger.outcomes.keys() == {COMPLETED}
    assert pings.all_well
    assert share(pings.seconds, 0.99) < PING_S
    gap, gap_alone = share(beside.gaps_s, 0.99), share(alone.gaps_s, 0.99)
    assert gap < GAPS * gap_alone
    record(
        "F15",
        f"{len(answers)} prompts of 1 to 8 MB from {LARGE} clients in {SECONDS} s: all refused with 400, half within "
        f"{share(refused, 0.5):.2f} s, the slowest after {max(refused):.2f} s; {pings}; {IN_WORDS}, gaps "
        f"of {STREAMS} streams p99 {1000 * gap:.0f} ms, {1000 * gap_alone:.0f} ms without",
    )


def test_a_request_larger_than_all_memory_for_keys_and_values_is_refused_at_admission(folder, tmp_path):
    flags = ("--num_blocks=8", "--block_size=16", "--max_model_len=256")
    with running_server(folder, tmp_path / "log", *flags) as server:
        baseline = take_baseline(server)
        slowest = 0.0
        for body in (
            {"prompt": [5] * 200, "max_tokens": 8},
            {"prompt": [5] * 20, "max_tokens": 200},
            {"prompt": "a" * 200, "max_tokens": 8, "stream": True},
        ):
            started = time.monotonic()
            answer = server.post("/v1/completions", body)
            slowest = max(slowest, time.monotonic() - started)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        fits = server.post("/v1/completions", {"prompt": [5] * 50, "max_tokens": 50, "ignore_eos": True})
        assert fits.json()["usage"]["completion_tokens"] == 50
        # Nobody but the one that fits, and the one of the baseline, has come to the engine.
        queued = server.metrics()
        assert sum(value for name, value in queued.items() if "request_queue_time_seconds_count" in name) == 2
        check_oracles(server, baseline=baseline)
    assert slowest < sized(1.0, 0.1)
    record("F17", f"requests larger than the KV cache: 400 `context_length_exceeded` in {1000 * slowest:.0f} ms")
