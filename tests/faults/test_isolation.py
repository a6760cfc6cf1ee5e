"""F30: what a request is told depends on nothing but itself, whoever was in its memory before. F32: nor on shapes that
nobody foresaw.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hex_llm import faults
from tests.checkpoints import write_llama
from tests.faults.answers import answers, answers_of, ledger_of
from tests.faults.oracles import check_oracles, take_baseline
from tests.faults.suite import record, sized
from tests.lora.for_model import Adapters
from tests.server.load import ABORTED, COMPLETED, Ledger, run_load
from tests.server.servers import RunningServer, running_server

CONTEXT, VOCABULARY = sized(512, 1024), 250
SHARED = sized(300, 512)  # tokens of a beginning
COUNT = sized(60, 2000)
SEEDS = range(sized(1, 3))
ADAPTERS = 4
FLAGS = (
    f"--max_model_len={CONTEXT}",
    f"--num_blocks={sized(192, 384)}",
    "--max_decode_seqs=16",
    "--enable_prefix_cache_hbm",
    "--enable_chunked_prefill",
    "--max_num_batched_tokens=96",
    "--disable_log_requests",
    "--max_queued_requests=4096",
    "--queue_timeout_s=600",
)
# What nobody has is NaN before every step, and requests are made to give way.
POISON = "device.blocks:nan,engine.preempt:now@0.05"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def flags(model, tmp_path_factory) -> tuple[str, ...]:
    """Of a server that has adapters for the model, more of them than places."""
    adapters = Adapters(model)
    named = [f"a{n}={adapters.write(tmp_path_factory.mktemp(f'a{n}'), seed=n)}" for n in range(ADAPTERS)]
    return (
        *FLAGS,
        "--enable_lora",
        "--max_num_mem_cached_lora=2",
        "--max_lora_rank=8",
        f"--lora_modules={','.join(named)}",
    )


@pytest.fixture(scope="module")
def alone(model, flags, tmp_path_factory) -> Iterator[RunningServer]:
    """A server for one request at a time, in which a prefix is never found."""
    log = tmp_path_factory.mktemp("alone") / "log"
    with running_server(model, log, *flags, "--no-enable_prefix_cache_hbm") as server:
        yield server


def bodies(seed: int) -> list[dict]:
    """A long beginning that many have, then a secret that nobody else has."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, VOCABULARY) for _ in range(SHARED)] for _ in range(8)]
    made = []
    for number in range(COUNT):
        secret = [rng.randrange(3, VOCABULARY) for _ in range(12)]
        model = rng.choice(("", "", *(f"a{n}" for n in range(ADAPTERS))))
        prompt = rng.choice(beginnings)[: rng.choice((SHARED, rng.randrange(40, SHARED)))] + secret
        asked = {"prompt": prompt, "max_tokens": rng.randrange(4, 24), "ignore_eos": True, "temperature": 0}
        made.append(asked | {"stream": number % 2 == 0} | ({"model": model} if model else {}))
    return made


@pytest.mark.parametrize("seed", SEEDS)
def test_every_answer_is_that_of_the_request_alone(model, flags, alone, tmp_path, seed):
    asked = bodies(seed)
    expected = answers(alone, asked, concurrency=1)
    assert all(each.startswith("[") for each in expected)
    assert len(set(expected)) > 0.9 * COUNT, "answers that are alike tell nothing"
    with running_server(model, tmp_path / "log", *flags, **{faults.VARIABLE: POISON}) as server:
        baseline = take_baseline(server)
        found, ledger = asyncio.run(_with_others_that_leave(server, asked, seed))
        metrics = server.metrics()
        check_oracles(server, ledger + ledger_of(found), baseline)
    assert ledger.outcomes.keys() <= {ABORTED, COMPLETED}, ledger.complaints
    wrong = [number for number, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    assert wrong == [], (found[wrong[0]], expected[wrong[0]])
    hits, given_way = (sum(v for n, v in metrics.items() if w in n) for w in ("cache_hits_total", "preemptions_total"))
    assert hits > 0
    assert given_way > 0
    record(
        "F30",
        f"seed {seed}: {COUNT} of {COUNT} as alone; {hits:.0f} tokens found in the cache, {given_way:.0f} times one"
        " gave way",
    )


async def _with_others_that_leave(server: RunningServer, asked: list[dict], seed: int) -> tuple[list[str], Ledger]:
    leaving = bodies(seed + 1000)[: COUNT // 4]
    return await asyncio.gather(
        answers_of(server, asked, concurrency=32),
        run_load(server.url, leaving, concurrency=8, abort_share=1.0, seed=seed),
    )


def test_no_length_and_no_batch_is_compiled_after_the_start(model, tmp_path):
    """F32."""
    lengths = range(1, CONTEXT - 4, sized(37, 1))
    with running_server(model, tmp_path / "log", *FLAGS) as server:
        asked = [
            {"prompt": [3 + n % 200] * n, "max_tokens": 2, "ignore_eos": True, "n": 1 + n % 4, "temperature": n % 2}
            for n in lengths
        ]
        for concurrency in sized((1, 16), (*range(1, 17), 32)):
            found = answers(server, asked if concurrency in (1, 16) else asked[:64], concurrency=concurrency)
            assert all(each.startswith("[") for each in found)
        check_oracles(server)  # which has the number of compilations be 0
    record("F32", f"{len(lengths)} lengths, batches of 1 to 32: 0 compilations after the start")
