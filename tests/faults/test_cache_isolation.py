"""F33: who has another key learns nothing of what others have asked, neither by a number nor by a clock."""

import random
import time

import httpx
import pytest

from tests.checkpoints import write_llama
from tests.faults.oracles import check_oracles, take_baseline
from tests.faults.suite import record, sized
from tests.server.servers import running_server

OWNER, OTHER = "sk-owner", "sk-other"
NUM_PAIRS = sized(10, 500)
LENGTH = 1500  # of a prompt, in tokens: enough that computing it takes a while
FLAGS = (
    "--enable_prefix_cache_hbm",
    "--max_model_len=2048",
    "--num_blocks=4096",
    "--max_num_batched_tokens=256",
    "--disable_log_requests",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("isolation")
    model = write_llama(folder / "model", max_position_embeddings=2048)
    with running_server(model, folder / "log", *FLAGS, keys=[OWNER, OTHER]) as server:
        yield server


def ask(client: httpx.Client, key: str, prompt: list[int]) -> tuple[int, float]:
    """The tokens that were found in the cache, and the seconds that one token took."""
    headers = {"Authorization": f"Bearer {key}"}
    started = time.perf_counter()
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}, headers=headers).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], time.perf_counter() - started


def distinguishable(slow: list[float], fast: list[float]) -> float:
    """The share of pairs whose second is faster: 0.5 where the clock tells nothing, 1 where it tells all (AUC)."""
    wins = sum((a > b) + 0.5 * (a == b) for a in slow for b in fast)
    return wins / (len(slow) * len(fast))


def test_a_prompt_that_another_key_has_asked_looks_like_one_that_nobody_has(server):
    rng = random.Random(0)

    def new_prompt() -> list[int]:
        return [rng.randrange(3, 259) for _ in range(LENGTH)]

    baseline = take_baseline(server)
    fresh, of_another, own = [], [], []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        ask(client, OTHER, new_prompt())
        for _ in range(NUM_PAIRS):
            asked_before, never_asked = new_prompt(), new_prompt()
            assert ask(client, OWNER, asked_before)[0] == 0
            probes = [(asked_before, of_another), (never_asked, fresh)]
            rng.shuffle(probes)
            for prompt, seconds in probes:
                cached, took = ask(client, OTHER, prompt)
                assert cached == 0
                seconds.append(took)
            cached, took = ask(client, OWNER, asked_before)
            assert cached > LENGTH - 32
            own.append(took)
    check_oracles(server, baseline=baseline)
    told, own_told = distinguishable(fresh, of_another), distinguishable(fresh, own)
    # With few pairs on busy cores a clock says nothing.
    if NUM_PAIRS >= 100:
        assert told <= 0.55
        assert own_told > 0.9, "the probe could not have told anything"
    record(
        "F33",
        f"{NUM_PAIRS} pairs: `cached_tokens` was 0 for the other key each time; by the clock, AUC {told:.2f} for the "
        f"other key, {own_told:.2f} for the owner's",
    )
