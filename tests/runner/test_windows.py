"""The engine with its real runner, on a model in which no token sees further back than a window."""

import numpy as np
import pytest

from hex_llm import build
from hex_llm.config import Config
from hex_llm.engine.admission import new_request
from hex_llm.engine.engine import Engine
from hex_llm.engine.request import SamplingParams
from tests.checkpoints import write_llama
from tests.runner.engines import SMALL, make_engine, run, sharing, tokens

WINDOW = 24
FLAGS = {"max_model_len": 400, "num_blocks": 200, "max_prefill_seqs": 4, "enable_chunked_prefill": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW}
    return write_llama(tmp_path_factory.mktemp("model"), **changes)


@pytest.fixture(scope="module")
def engine(folder):
    return make_engine(folder, **FLAGS)


def asked(num_prompt: int, max_tokens: int, seed: int = 0, **more) -> tuple[list[int], SamplingParams]:
    prompt = np.random.default_rng(seed).integers(3, 320, num_prompt).tolist()
    return prompt, SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, **more)


def spoil_empty_pages(engine: Engine) -> None:
    """Fills what nobody owns and nothing remembers, and what padding writes to, with NaN."""
    engine._runner.spoil(engine._scheduler.pool.empty)


def test_a_long_output_fits_in_a_few_blocks_and_is_the_same_as_with_all_kept(engine):
    few = sharing(engine, num_blocks=13)  # 12 blocks: for the 24 tokens of the window and the 64 of a step
    assert few.limits.most_blocks == 12
    kept = sharing(engine, reach=None, prefix_caching=False)
    long = asked(40, 300)
    (expected,) = run(kept, long)
    used = []
    few.add(new_request("r", *long, few.limits))
    got = []
    while few.has_work:
        got += few.step()
        used.append(few.stats().blocks_used)
    assert tokens(got) == tokens(expected)
    assert len(tokens(expected)) == 300
    assert max(used[10:]) <= 5  # 24 tokens touch 4 blocks of 8, and one is on its way back
    few.check()


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_what_is_out_of_the_window_is_not_looked_at_whatever_has_become_of_it(engine, max_in_flight):
    kept = sharing(engine, reach=None, prefix_caching=False)
    some = [asked(300, 20), asked(3, 90, 1), asked(70, 60, 2), asked(150, 30, 3), asked(40, 350, 4), asked(9, 9, 5)]
    expected = [tokens(run(kept, each)[0]) for each in some]
    spoilt = sharing(engine, prefix_caching=False, num_blocks=32, max_in_flight=max_in_flight)
    for number, each in enumerate(some):
        spoilt.add(new_request(f"{number}", *each, spoilt.limits))
    got: dict[str, list[int]] = {f"{number}": [] for number in range(len(some))}
    while spoilt.has_work:
        spoil_empty_pages(spoilt)
        for output in spoilt.step():
            got[output.request_id] += output.tokens
        spoilt.check()
    assert list(got.values()) == expected


def test_a_prefix_is_taken_up_where_only_its_last_blocks_are_left(engine):
    first, _ = asked(200, 1)
    long = ([*first, 7, 8, 9], SamplingParams(temperature=0, max_tokens=20))
    (expected,) = run(sharing(engine, reach=None, prefix_caching=False), long)
    cached = sharing(engine, prefix_caching=True)
    run(cached, (first, SamplingParams(temperature=0, max_tokens=1)))
    pool = cached._scheduler.pool
    pool.forget(list(pool._block)[:22])  # 25 there were
    spoil_empty_pages(cached)
    (got,) = run(cached, long)
    assert got[0].num_cached == 192  # of 200, in units of 32
    assert tokens(got) == tokens(expected)


def test_the_flag_for_a_window_bounds_memory_as_the_models_own_does(folder):
    def reach(**flags) -> int | None:
        config = Config(model=str(folder), **SMALL | FLAGS | flags)
        return build._limits(config, build.find_model(config), 201).reach

    assert (reach(), reach(sliding_window=16), reach(sliding_window=1)) == (24, 16, 2)
    assert reach(max_model_len=24) is None


def test_a_sequence_longer_than_the_kv_cache_needs_room_for_the_window_and_a_step_alone(folder):
    config = Config(model=str(folder), **SMALL | FLAGS | {"num_blocks": 12})
    model = build.find_model(config)
    assert build._limits(config, model, 13).context == 400
    assert build._limits(config, model, 12).context == 88
    assert build._sequence_blocks(config, model) == 12
