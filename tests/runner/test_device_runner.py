"""The engine with its real runner: what a request gets depends on the request alone."""

import dataclasses
import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm import build
from hex_llm.config import Config
from hex_llm.engine.admission import new_request
from hex_llm.engine.request import FinishReason, SamplingParams
from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention import api
from hex_llm.models import decoder
from hex_llm.runner import runner as runner_module
from hex_llm.runner.buckets import SEPARATE, TOGETHER
from tests.checkpoints import write_llama
from tests.faults.suite import record
from tests.runner.engines import SMALL, make_engine, run, sharing, tokens

VOCAB = 320
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
    return make_engine(folder, max_prefill_seqs=4)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def plain_logits(engine, sequence: list[int]) -> np.ndarray:
    """[T, V]: the model over a whole sequence at once, with no engine around it."""
    runner = engine._runner
    padded = np.zeros(SMALL["max_model_len"], np.int32)
    padded[: len(sequence)] = sequence
    return np.asarray(_plain(runner._params, runner._compiler.programs.arch, padded, len(sequence)))[: len(sequence)]


@partial(jax.jit, static_argnums=1)
def _plain(params, arch, sequence, length):
    places = jnp.arange(len(sequence), dtype=jnp.int32)
    pages = jnp.zeros((2, 2, arch.num_kv_heads, len(sequence), arch.head_dim), jnp.float32)
    batch = Batch(
        tokens=sequence,
        positions=places,
        write_page=jnp.ones_like(places),
        write_offset=places,
        cu_q=jnp.stack([0, length]).astype(jnp.int32),
        kv_len=jnp.stack([length]).astype(jnp.int32),
        page_table=jnp.array([[1]], jnp.int32),
        num_decode=jnp.int32(0),
        num_seqs=jnp.int32(1),
    )
    monkey = pytest.MonkeyPatch()
    monkey.setitem(api.BEST, "cpu", "reference")
    hidden, _ = decoder.forward(params, arch, (pages,) * arch.num_layers, batch)
    monkey.undo()
    return decoder.logits(params, arch, hidden)


def random_request(rng: random.Random, shared: list[int]) -> tuple[list[int], SamplingParams]:
    start = shared[: rng.choice([0, 0, 16, 30, 40])]
    body = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 2, 7, 20]))]
    extras = rng.choice(
        [
            {},
            {},
            {"repetition_penalty": 1.3, "presence_penalty": 0.4},
            {"logprobs": 2},
            {"prompt_logprobs": 1},
            {"logit_bias": {rng.randrange(VOCAB): 100.0, rng.randrange(VOCAB): -100.0}},
            {"min_tokens": 2, "logit_bias": {rng.randrange(VOCAB): 5.0}},
        ]
    )
    sampling = SamplingParams(
        max_tokens=rng.choice([2, 3, 12, 24]),
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 0.8]),
        seed=rng.randrange(2**32),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 30]))),
        **extras,
    )
    return start + body, sampling


@pytest.mark.parametrize("setting", range(20))
def test_every_schedule_gives_the_same_output(engine, setting):
    rng = random.Random(setting)
    crowded = sharing(
        engine,
        max_prefills=rng.choice([1, 2, 4]),
        num_blocks=rng.choice([13, 15, 65]),  # 12 blocks, and the null block, hold one request of 96 tokens
        step_tokens=rng.choice([16, 32, 64]),
        chunked=rng.random() < 0.5,
        prefix_caching=rng.random() < 0.6,
        max_in_flight=rng.choice([0, 1, 1, 1]),
    )
    shared = prompt(40, seed=setting)
    asked = [random_request(rng, shared) for _ in range(12)]
    aborts = {rng.randrange(30): rng.randrange(12) for _ in range(rng.choice([0, 3]))}
    together = [tokens(outputs) for outputs in run(crowded, *asked, aborts=aborts)]
    alone = [tokens(run(engine, each)[0]) for each in asked]
    for number, (got, expected) in enumerate(zip(together, alone, strict=True)):
        assert got == (expected[: len(got)] if number in aborts.values() else expected)
    assert crowded.stats().blocks_used == 0


def test_after_warm_up_nothing_is_compiled(folder):
    engine = make_engine(folder, warmup=True, max_decode_seqs=8, decode_seqs_padding=4)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    jax.jit(lambda x: x + 1)(jnp.ones(7, jnp.float32))
    assert compiled, "the listener hears of compilations"
    compiled.clear()
    longest = SMALL["max_model_len"]
    for length in range(1, longest):
        run(engine, (prompt(length), SamplingParams(max_tokens=min(2, longest - length))))
    variants = [{}, {"logprobs": 1}, {"prompt_logprobs": 1}, {"repetition_penalty": 1.2}, {"temperature": 0.0}]
    chunked = sharing(engine, chunked=True)
    for size in range(1, 9):
        for extras in variants:
            asked = [(prompt(5, seed=i), SamplingParams(max_tokens=4, **extras)) for i in range(size)]
            run(engine, *asked)
            run(chunked, *asked)
    assert not compiled


def test_a_seed_gives_the_same_output_alone_in_a_crowd_and_after_a_preemption(folder, engine):
    sampling = SamplingParams(temperature=1.0, seed=1234, max_tokens=24)
    (alone,) = run(engine, (prompt(9), sampling))
    others = [(prompt(9, seed=i), SamplingParams(temperature=1.0, seed=i, max_tokens=24)) for i in range(1, 32)]
    crowd = make_engine(folder, max_decode_seqs=32, num_blocks=256, max_prefill_seqs=4)
    assert tokens(run(crowd, (prompt(9), sampling), *others)[0]) == tokens(alone)
    assert tokens(run(crowd, *others, (prompt(9), sampling))[-1]) == tokens(alone)
    tight = sharing(engine, num_blocks=13)
    outputs = run(tight, *others[:7], (prompt(9), sampling))
    assert tight.stats().total_preemptions > 0
    assert tokens(outputs[-1]) == tokens(alone)
    (other_seed,) = run(engine, (prompt(9), SamplingParams(temperature=1.0, seed=1235, max_tokens=24)))
    assert tokens(other_seed) != tokens(alone)


def test_greedy_tokens_and_logprobs_are_those_of_the_plain_model(engine):
    start = prompt(13)
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=3)
    (outputs,) = run(engine, (start, sampling))
    chosen = tokens(outputs)
    logits = plain_logits(engine, start + chosen)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert chosen == logits[len(start) - 1 : -1].argmax(-1).tolist()
    for place, output in enumerate(outputs, len(start) - 1):
        (told,) = output.logprobs
        assert told.rank == 1
        assert told.logprob == pytest.approx(expected[place].max(), abs=1e-4)
        best = np.argsort(-expected[place])[:5]
        assert [token for token, _ in told.top] == best.tolist()
        np.testing.assert_allclose([logprob for _, logprob in told.top], expected[place][best], atol=1e-4)
    prompt_logprobs = outputs[0].prompt_logprobs
    assert prompt_logprobs[0] is None
    assert len(prompt_logprobs) == len(start)
    for place in range(1, len(start)):
        told = prompt_logprobs[place]
        assert told.logprob == pytest.approx(expected[place - 1][start[place]], abs=1e-4)
        assert told.rank == 1 + (expected[place - 1] > expected[place - 1][start[place]]).sum()
        assert len(told.top) == 3


def test_prompt_logprobs_of_a_prompt_over_several_steps_are_whole(engine):
    start = prompt(70)
    sampling = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    (outputs,) = run(engine, (start, sampling))
    logits = plain_logits(engine, start)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    told = [each.logprob for each in outputs[0].prompt_logprobs[1:]]
    np.testing.assert_allclose(told, expected[np.arange(69), start[1:]], atol=1e-4)


def test_prompt_logprobs_of_a_prompt_that_goes_token_by_token_are_whole(engine):
    asked = (prompt(9), SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0))
    expected = run(engine, asked)[0][0].prompt_logprobs[1:]
    crowded = sharing(engine, chunked=True, step_tokens=8)  # seven decodes leave room for one token
    decodes = [(prompt(3, seed=i), SamplingParams(temperature=0, max_tokens=40)) for i in range(7)]
    told = run(crowded, *decodes, asked)[-1][0].prompt_logprobs[1:]
    np.testing.assert_allclose([each.logprob for each in told], [each.logprob for each in expected], atol=1e-4)


def test_penalties_count_prompt_and_output_also_after_a_preemption(engine):
    sampling = SamplingParams(
        temperature=0, max_tokens=24, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.6
    )
    start = prompt(9)
    sequence = list(start)
    for _ in range(24):
        logits = plain_logits(engine, sequence)[-1].copy()
        seen = np.unique(sequence)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.4, logits[seen] * 1.4)
        for token in sequence[len(start) :]:
            logits[token] -= 0.6
        logits[np.unique(sequence[len(start) :]).astype(int)] -= 0.7
        sequence.append(int(logits.argmax()))
    assert tokens(run(engine, (start, sampling))[0]) == sequence[len(start) :]
    tight = sharing(engine, num_blocks=13)
    others = [(prompt(9, seed=i), SamplingParams(temperature=0, max_tokens=24)) for i in range(7)]
    outputs = run(tight, *others, (start, sampling))
    assert tight.stats().total_preemptions > 0
    assert tokens(outputs[-1]) == sequence[len(start) :]


def test_a_request_goes_on_from_a_part_of_its_answer_as_if_it_had_been_computed_here(engine):
    rules = {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.6,
        "logit_bias": {9: 3.0},
        "min_tokens": 10,
        "stop_token_ids": list(range(3, 300)),  # of which one comes as soon as it may
    }
    for sampling in (
        SamplingParams(temperature=1.0, seed=5, max_tokens=24),
        SamplingParams(temperature=0.8, top_k=20, seed=6, max_tokens=24, logprobs=2),
        SamplingParams(temperature=1.0, seed=7, max_tokens=24, **rules),
    ):
        (outputs,) = run(engine, (prompt(9), sampling))
        expected = tokens(outputs)
        assert len(expected) >= 10
        for num_brought in (1, 5, 9):
            request = new_request("moved", prompt(9), sampling, engine.limits)
            request.output = expected[:num_brought]
            engine.add(request)
            told = []
            while engine.has_work:
                told += engine.step()
            assert tokens(told) == expected[num_brought:]
            assert told[-1].finish_reason == outputs[-1].finish_reason


def test_a_slot_forgets_the_rules_of_the_request_that_had_it_before(engine):
    (expected,) = run(engine, (prompt(5), GREEDY))
    for _ in range(8):  # whichever slot comes next has held rules
        biased = SamplingParams(temperature=0, max_tokens=3, logit_bias={9: 100.0})
        run(engine, *[(prompt(5, seed=i), biased) for i in range(8)])
    beside = SamplingParams(temperature=0, max_tokens=12, logprobs=1)  # brings the variant that looks at rules
    plain, _ = run(engine, (prompt(5), GREEDY), (prompt(6), beside))
    assert tokens(plain) == tokens(expected)


def test_an_aborted_request_leaves_the_others_as_they_are(engine):
    expected = [tokens(run(engine, (prompt(9, seed=i), GREEDY))[0]) for i in range(4)]
    for number in range(4):
        engine.add(new_request(f"kept-{number}", prompt(9, seed=number), GREEDY, engine.limits))
        engine.add(new_request(f"dropped-{number}", prompt(9, seed=number), GREEDY, engine.limits))
    got: dict[str, list[int]] = {f"kept-{number}": [] for number in range(4)}
    for step in range(1000):
        if step < 4:
            engine.abort(f"dropped-{step}")
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.tokens)
        if not engine.has_work:
            break
    engine.check()
    assert [got[f"kept-{number}"] for number in range(4)] == expected


def test_logit_bias_forces_and_forbids(engine):
    (forced,) = run(engine, (prompt(5), SamplingParams(temperature=1.0, seed=1, max_tokens=6, logit_bias={7: 100.0})))
    assert tokens(forced) == [7] * 6
    free = tokens(run(engine, (prompt(5), GREEDY))[0])
    (without,) = run(engine, (prompt(5), SamplingParams(temperature=0, max_tokens=12, logit_bias={free[0]: -100.0})))
    assert free[0] not in tokens(without)


def test_a_bad_word_of_several_tokens_is_never_completed(engine):
    free = tokens(run(engine, (prompt(5), GREEDY))[0])
    word = tuple(free[2:5])
    request = new_request("with", prompt(5), GREEDY, engine.limits, bad_words=[word])
    engine.add(request)
    got = []
    while engine.has_work:
        got += [token for output in engine.step() for token in output.tokens]
    assert got[:4] == free[:4]
    assert got[4] != free[4]
    assert all(tuple(got[i : i + 3]) != word for i in range(len(got)))


def test_min_tokens_holds_a_stop_token_back(engine):
    free = tokens(run(engine, (prompt(5), GREEDY))[0])
    stop = free[1]
    early = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,))
    (outputs,) = run(engine, (prompt(5), early))
    assert (len(tokens(outputs)), outputs[-1].finish_reason) == (free.index(stop) + 1, FinishReason.STOP)
    late = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(stop,), min_tokens=6)
    assert stop not in tokens(run(engine, (prompt(5), late))[0])[:6]


def test_a_row_of_nan_ends_that_request_alone(engine, monkeypatch):
    expected = [tokens(run(engine, (prompt(9, seed=i), GREEDY))[0]) for i in range(8)]
    poison = min(set(range(VOCAB)) - {token for each in expected for token in each} - set(range(3)))
    prompts = [prompt(9, seed=i) for i in range(8)]
    assert all(poison not in each for each in prompts)
    params = engine._runner._params
    poisoned = dataclasses.replace(params, embed=params.embed.at[poison].set(jnp.nan))
    monkeypatch.setattr(engine._runner, "_params", poisoned)
    good, bad, also_good = run(engine, (prompts[0], GREEDY), ([9, poison, 11], GREEDY), (prompts[0], GREEDY))
    assert (tokens(bad), bad[-1].finish_reason) == ([], FinishReason.ERROR)
    assert tokens(good) == tokens(also_good) == expected[0]
    # Nor does what it left in memory reach those who get its blocks.
    assert [tokens(each) for each in run(engine, *[(each, GREEDY) for each in prompts])] == expected


@pytest.mark.parametrize("failing", range(1, 12, 2))
def test_what_runs_when_the_devices_memory_runs_out_is_computed_again(folder, monkeypatch, failing):
    """In a step of any kind, whose cache was donated to it; a prefix that was found before is not found any more."""
    engine = make_engine(folder, max_prefill_seqs=4, enable_prefix_cache_hbm=True)
    rng = random.Random(5)
    asked = [random_request(rng, prompt(40)) for _ in range(8)]
    expected = [tokens(each) for each in run(engine, *asked)]
    left = failing

    def reach(point: str) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")

    monkeypatch.setattr(runner_module, "reach", reach)
    assert [tokens(each) for each in run(engine, *asked)] == expected
    assert engine.stats().total_ooms == 1
    assert engine.stats().total_preemptions == 0, "they gave way to nobody"


def test_what_else_a_device_says_ends_the_engine(folder, monkeypatch):
    engine = make_engine(folder)

    def reach(point: str) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(runner_module, "reach", reach)
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        run(engine, (prompt(5), GREEDY))
    assert engine.is_dead


def test_a_found_prefix_with_nan_in_it_is_offered_once_and_no_more(folder):
    engine = make_engine(folder, enable_prefix_cache_hbm=True)
    asked = prompt(40), GREEDY
    (expected,) = run(engine, asked)
    engine._runner.spoil([min(engine._scheduler.pool._block.values())])
    (spoilt,) = run(engine, asked)
    assert (tokens(spoilt), spoilt[-1].finish_reason) == ([], FinishReason.ERROR)
    (again,) = run(engine, asked)
    assert tokens(again) == tokens(expected)
    record("F18", "NaN in a block of a prefix: the request that found it failed, and the next one's answer is right")


def test_a_compiled_step_for_each_variant_and_one_for_all_give_the_same_output(folder, engine, monkeypatch):
    monkeypatch.setattr(build, "TOGETHER", SEPARATE)
    separate = make_engine(folder, max_prefill_seqs=4)
    assert separate._runner._packer._buckets.variants == SEPARATE
    assert engine._runner._packer._buckets.variants == TOGETHER
    rng = random.Random(5)
    asked = [random_request(rng, prompt(40)) for _ in range(16)]
    for some in (asked[:1], asked[1:4], asked[4:]):
        for got, expected in zip(run(separate, *some), run(engine, *some), strict=True):
            assert tokens(got) == tokens(expected)
            for one, other in zip(got, expected, strict=True):
                assert (one.logprobs is None, one.prompt_logprobs) == (other.logprobs is None, other.prompt_logprobs)
                assert [each.top for each in one.logprobs or ()] == [each.top for each in other.logprobs or ()]


def test_a_start_tells_how_far_it_is(folder):
    told: list[tuple[str, float]] = []
    config = Config(model=str(folder), **SMALL | {"warmup": True})
    build.build_engine(config, build.find_model(config), lambda phase, share: told.append((phase, share)))
    phases = [build.PLANNING, build.WEIGHTS, build.KV_CACHE, build.COMPILING]
    assert list(dict.fromkeys(phase for phase, _ in told)) == phases
    for phase in phases:
        shares = [share for each, share in told if each == phase]
        assert shares == sorted(shares)
        assert (shares[0] < 1, shares[-1]) == (True, 1)


def test_a_compilation_after_the_start_is_told_before_and_after(folder):
    told: list[tuple[str, float]] = []
    config = Config(model=str(folder), **SMALL)
    engine = build.build_engine(config, build.find_model(config), lambda phase, share: told.append((phase, share)))
    assert build.COMPILING not in dict(told)
    told.clear()
    run(engine, (prompt(3), SamplingParams(max_tokens=2, logprobs=1)))
    assert told == [(build.COMPILING, 0.0), (build.COMPILING, 1.0)] * 4  # admission, prompt, choice, decode
    told.clear()
    run(engine, (prompt(3), SamplingParams(max_tokens=2)))
    assert not told


def test_without_jit_the_output_is_the_same(folder, engine):
    asked = (prompt(6), SamplingParams(temperature=0.9, seed=3, max_tokens=3))
    plain = make_engine(folder, enable_jit=False)
    assert tokens(run(plain, asked)[0]) == tokens(run(engine, asked)[0])


def test_a_sliding_window_hides_what_is_out_of_it(folder):
    engine = make_engine(folder, sliding_window=8)
    # Two layers with a window of 8 see at most 15 tokens back.
    far, near = prompt(40), prompt(40)
    far[:20] = prompt(20, seed=9)
    near[35] = 3 + (near[35] - 2) % 300
    (base,), (same,), (other,) = (run(engine, (each, GREEDY)) for each in (prompt(40), far, near))
    assert tokens(base) == tokens(same)
    assert tokens(base) != tokens(other)
