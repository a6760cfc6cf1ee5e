"""Many adapters and few slots: whatever comes late, fails or goes away, every request gets its own adapter's answer."""

import random

import pytest

from hex_llm.engine.engine import Engine
from hex_llm.engine.limits import most_blocks
from hex_llm.engine.request import Request
from tests.engine.fake_carrier import FakeCarrier
from tests.engine.fakes import VOCAB, FakeRunner, alone, make_engine, make_request

NUM_SETTINGS = 200
NUM_ADAPTERS = 40
NUM_SLOTS = 4
LONGEST = 36  # tokens
# Steps that the first of those whose adapters have come may be the first for: all that run may have to end before it.
PATIENCE = 50


class Carrier(FakeCarrier):
    """Each adapter comes after a while of its own, and some never do."""

    def __init__(self, rng: random.Random, bad: set[str], latest: int):
        super().__init__(bad)
        self._rng = rng
        self._latest = latest
        self._due: dict[str, int] = {}

    def fetch(self, identity: str, source: str) -> None:
        super().fetch(identity, source)
        self._due[identity] = self._rng.randrange(self._latest + 1)

    def move(self) -> None:
        for identity in list(self.asked):
            self._due[identity] -= 1
            if self._due[identity] < 0:
                self.bring(identity)


def random_engine(rng: random.Random, carrier: Carrier) -> tuple[Engine, FakeRunner]:
    block_size, max_running = rng.choice([2, 4]), rng.choice([1, 3, 8, 8])
    step_tokens = max_running + rng.choice([0, 5, 64])
    least = most_blocks(LONGEST, block_size, reach=None, step_tokens=step_tokens)
    return make_engine(
        carrier=carrier,
        num_adapters=rng.choice([1, 2, NUM_SLOTS, NUM_SLOTS]),
        max_in_flight=rng.choice([0, 1, 1, 2]),
        lazy=rng.random() < 0.7,
        max_model_len=LONGEST,
        block_size=block_size,
        num_blocks=1 + least + rng.choice([0, 2, least, 8 * least]),
        max_running=max_running,
        max_prefills=rng.choice([1, 2, 8]),
        step_tokens=step_tokens,
        chunked=rng.random() < 0.5,
        prefix_caching=rng.random() < 0.6,
    )


def random_requests(rng: random.Random) -> list[Request]:
    shared = [rng.randrange(VOCAB) for _ in range(12)]
    popular = rng.choice([1, 3, NUM_ADAPTERS])
    adapters = [
        "" if rng.random() < 0.2 else f"a{rng.randrange(popular if rng.random() < 0.5 else NUM_ADAPTERS)}"
        for _ in range(80)
    ]
    callers = rng.choice(["a", "ab", "aaaab", "abcdefgh"])
    return [
        make_request(
            [*shared[: rng.randrange(13)], rng.randrange(VOCAB)],
            rng.choice([1, 2, 6, 20]),
            adapter=adapter,
            caller=rng.choice(callers),
        )
        for adapter in adapters
    ]


def first_in_reach(engine: Engine, carrier: Carrier) -> Request | None:
    """The first in the queue that waits for no more than its turn."""
    queue = engine._scheduler.waiting.values()
    return next((each for each in queue if each.adapter not in carrier.asked), None)


@pytest.mark.parametrize("setting", range(NUM_SETTINGS))
def test_every_request_gets_the_answer_of_its_own_adapter_or_hears_that_there_is_none(setting):
    rng = random.Random(setting)
    requests = random_requests(rng)
    bad = {f"a{number}" for number in rng.sample(range(NUM_ADAPTERS), rng.choice([0, 4, 12]))}
    carrier = Carrier(rng, bad, latest=rng.choice([0, 3, 30]))
    engine, _ = random_engine(rng, carrier)
    spread = rng.choice([1, 60, 200])
    arrivals = sorted((rng.randrange(spread), index) for index in range(len(requests)))
    aborts = {rng.randrange(300): rng.choice(requests) for _ in range(rng.choice([0, 10, 40]))}
    told: dict[str, list[int]] = {request.id: [] for request in requests}
    ended: dict[str, str] = {}
    first, since = None, 0

    for now in range(20_000):
        while arrivals and arrivals[0][0] <= now:
            engine.add(requests[arrivals.pop(0)[1]])
        if now in aborts and engine.abort(aborts[now].id):
            ended[aborts[now].id] = "aborted"
        carrier.move()
        while carrier.said and rng.random() < 0.8:
            ended |= dict.fromkeys(engine.hear(carrier.said.popleft()), "lost")
        for output in engine.step():
            assert output.request_id not in ended
            told[output.request_id] += output.tokens
            if output.finish_reason:
                ended[output.request_id] = "answered"
        engine.check()
        if (found := first_in_reach(engine, carrier)) is not first:
            first, since = found, now
        assert first is None or now - since < PATIENCE, "the first in the queue starves"
        if not (arrivals or engine.has_work):
            break
    else:
        raise AssertionError("it does not come to an end")

    assert engine.is_idle
    assert (engine.stats().adapters_used, engine.stats().adapters_loading, carrier.asked) == (0, 0, [])
    assert ended.keys() == told.keys()
    for request in requests:
        expected, tokens, how = alone(request), told[request.id], ended[request.id]
        assert tokens == expected[: len(tokens)]
        assert how != "answered" or tokens == expected
        assert how == "aborted" or (how == "lost") == (request.adapter in bad)
