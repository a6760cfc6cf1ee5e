"""When requests are sent, how many at once, and what is noted of their answers."""

import asyncio

import numpy as np
import pytest

from hex_llm.bench.backends import BACKENDS
from hex_llm.bench.http_client import HttpClient
from hex_llm.bench.load import Target, arrival_times, send_all
from hex_llm.bench.prompt import Prompt
from tests.bench.fake_server import NO_FAULT, FakeServer


def outcomes_of(server, *, backend="openai", count=1, output_tokens=4, max_concurrency=None, timeout_s=10.0):
    api = BACKENDS[backend]
    body = api.message(Prompt("one two three", 3, output_tokens), "fake", {}, {})
    done = []

    async def run():
        client = HttpClient(server.url, {})
        try:
            return await send_all(
                Target(client, api, api.endpoint, timeout_s),
                [body] * count,
                [0.0] * count,
                max_concurrency=max_concurrency,
                on_done=lambda: done.append(None),
            )
        finally:
            client.close()

    outcomes, duration = asyncio.run(run())
    assert len(done) == count
    return outcomes, duration


def gaps(times):
    return np.diff([0.0, *times])


def test_an_infinite_rate_sends_everything_at_once():
    assert arrival_times(3, float("inf"), 1.0, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(burstiness):
    found = gaps(arrival_times(20_000, 50.0, burstiness, np.random.default_rng(0)))
    assert found.min() >= 0
    assert found.sum() == pytest.approx(20_000 / 50.0)  # exactly, whatever was drawn
    # A gamma distribution of shape k spreads by 1 / sqrt(k) of its mean.
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_infinite_burstiness_is_a_clock():
    assert arrival_times(4, 2.0, float("inf"), np.random.default_rng(0)) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_the_seed_decides_the_arrivals():
    first, again, other = (arrival_times(50, 5.0, 1.0, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("max_concurrency", [1, 3, 8])
def test_no_more_requests_than_allowed_are_under_way(max_concurrency):
    with FakeServer(prefill_s=0.005) as server:
        outcomes, _ = outcomes_of(server, count=24, max_concurrency=max_concurrency)
        assert server.peak == max_concurrency
        assert server.connections == max_concurrency  # each is used again
    assert all(outcome.error is None for outcome in outcomes)


def test_without_a_limit_all_requests_are_under_way():
    with FakeServer(prefill_s=0.3) as server:
        outcomes_of(server, count=50)
        assert server.peak == 50


@pytest.mark.parametrize("backend", ["openai", "openai-chat", "generate", "generate-stream"])
def test_times_are_those_of_the_server(backend):
    with FakeServer(prefill_s=0.1, gap_s=0.05) as server:
        ((outcome,), duration) = outcomes_of(server, backend=backend, output_tokens=5)
    assert outcome.first_token_s is not None
    assert 0.1 <= outcome.first_token_s < outcome.latency_s
    assert len(outcome.gaps_s) == 4
    assert outcome.latency_s >= 0.3
    assert outcome.latency_s == pytest.approx(outcome.first_token_s + sum(outcome.gaps_s))
    assert outcome.latency_s <= duration
    assert outcome.text == "t0 t1 t2 t3 t4 "
    assert outcome.output_tokens == (5 if backend.startswith("openai") else None)


def test_an_answer_in_one_piece_has_no_first_token():
    with FakeServer(prefill_s=0.05) as server:
        ((outcome,), _) = outcomes_of(server, backend="vertex")
        assert list(server.bodies[0]) == ["instances"]
    assert (outcome.first_token_s, outcome.gaps_s, outcome.output_tokens) == (None, (), None)
    assert outcome.latency_s >= 0.05


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("status", "HTTP 429: The queue is full."),
        ("page", "HTTP 502: The answer is not JSON: <p>bad</p>"),
        ("drop", "The server closed the connection without an answer."),
        ("close", "The server closed the connection in the middle of its answer."),
        ("error", "The engine died."),
        ("garbage", "The answer is not JSON: {]"),
        ("shape", "The stream has a chunk of another shape: {'choices': ['text']}"),
        ("no done", "The stream ended without [DONE]."),
        ("hang", "The request took more than 2 s."),
    ],
)
def test_a_fault_fails_its_request_and_no_other(fault, message):
    with FakeServer(fault=lambda number: fault if number == 2 else NO_FAULT) as server:
        outcomes, _ = outcomes_of(server, count=6, max_concurrency=1, timeout_s=2)
    assert [outcome.error for outcome in outcomes] == [None, None, message, None, None, None]


@pytest.mark.parametrize(
    ("fault", "message"),
    [("error", "The engine died."), ("close", "The server closed the connection in the middle of its answer.")],
)
def test_a_fault_of_generate_fails_its_request(fault, message):
    with FakeServer(fault=lambda number: fault) as server:
        ((outcome,), _) = outcomes_of(server, backend="generate")
    assert outcome.error == message


def test_requests_to_a_server_that_is_gone_fail():
    with FakeServer() as server:
        pass
    outcomes, _ = outcomes_of(server, count=3)
    assert all("cannot be reached" in (outcome.error or "") for outcome in outcomes)
