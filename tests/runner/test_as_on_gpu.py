"""An engine that plans and pads its steps as on a GPU, on whatever device there is."""

import random
from functools import wraps

import jax
import pytest

from hex_llm import build
from hex_llm.engine.request import SamplingParams
from hex_llm.runner import logprobs
from hex_llm.runner.buckets import Variant
from hex_llm.runner.programs import Choose, Process, Remember, Score, ScorePrompt
from tests.checkpoints import write_llama
from tests.runner.engines import make_engine, run, tokens

VOCAB = 320
# What a request may ask for, from the least that choosing its tokens takes to the most.
WISHES = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {5: 4.0}},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "prompt_logprobs": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(folder):
    return make_engine(folder, max_prefill_seqs=4)


@pytest.fixture
def like_gpu(folder, monkeypatch):
    """Steps of 64 tokens, of 16 where some decode; and 20 blocks of KV cache, too few for all who run.

    Log-probabilities of prompts are made for 4 tokens at a time.
    """
    monkeypatch.setattr(build, "WHOLE_STEP_TOKENS", 64)
    monkeypatch.setattr(build, "GPU_MIXED_TOKENS", 16)
    monkeypatch.setattr(logprobs, "PROMPT_ROWS", 4)
    for name in ("make_buckets", "_limits", "_shapes"):
        monkeypatch.setattr(build, name, _on_gpu(getattr(build, name)))
    flags = {"enable_chunked_prefill": True, "max_num_batched_tokens": None, "num_blocks": 20}
    # Kept programs know nothing of what is patched here.
    engine = make_engine(folder, **flags, compilation_cache_dir="")
    assert (engine.limits.step_tokens, engine.limits.mixed_tokens) == (64, 16)
    return engine


def _on_gpu(function):
    @wraps(function)
    def patched(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: "gpu")
            return function(*arguments)

    return patched


def _asked() -> list[tuple[list[int], SamplingParams]]:
    """A wish at a time, each for a short and for a long prompt: those in a step then want different things."""
    rng = random.Random(0)
    return [
        ([rng.randrange(3, VOCAB) for _ in range(length)], SamplingParams(max_tokens=10 + 3 * seed, seed=seed, **wish))
        for seed, (wish, length) in enumerate((wish, length) for wish in WISHES for length in (3, 40))
    ]


def _told(outputs):
    """All that a request was told of probabilities, as numbers, and which tokens they are about."""
    told = [each for output in outputs for part in (output.prompt_logprobs, output.logprobs) for each in part or ()]
    return [each and ([token for token, _ in each.top], each.rank) for each in told], [
        number for each in told if each for number in (each.logprob, *(logprob for _, logprob in each.top))
    ]


def test_the_output_is_that_of_an_engine_that_does_one_thing_at_a_time(plain, like_gpu, monkeypatch):
    steps, programs = [], []
    dispatch, get = like_gpu._runner.dispatch, like_gpu._runner._compiler.get
    monkeypatch.setattr(like_gpu._runner, "dispatch", lambda step: (steps.append(tuple(step)), dispatch(step))[1])
    monkeypatch.setattr(like_gpu._runner._compiler, "get", lambda each: (programs.append(each), get(each))[1])
    asked = _asked()
    together, alone = run(like_gpu, *asked), run(like_gpu, asked[0])
    for got, each in zip(together + alone, [*asked, asked[0]], strict=True):
        (expected,) = run(plain, each)
        assert tokens(got) == tokens(expected)
        (got_ids, got_numbers), (ids, numbers) = _told(got), _told(expected)
        assert got_ids == ids
        assert got_numbers == pytest.approx(numbers, abs=1e-4)

    # And the engine had all of it to do.
    assert like_gpu.stats().total_preemptions > 0
    assert {type(each) for each in programs} >= {Choose, Process, Remember, Score, ScorePrompt}
    choosers = {each.variant for each in programs if isinstance(each, Choose)}
    assert choosers == {Variant.GREEDY, Variant.DRAWN, Variant.FILTERED}
    sizes = {True: set(), False: set()}  # of steps with prompts in them, with and without decodes
    for step in steps:
        if not all(piece.decodes for piece in step):
            sizes[any(piece.decodes for piece in step)].add(sum(piece.length for piece in step))
    assert max(sizes[True]) == 16
    assert max(sizes[False]) == 64
    assert any(
        piece.request.sampling.prompt_logprobs is not None and piece.start > 0 and piece.length > 1
        for step in steps
        for piece in step
        if any(other.decodes for other in step)
    )
