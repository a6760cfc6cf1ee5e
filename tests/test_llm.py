"""The engine with its text side: what LLM.generate and LLM.chat promise."""

import gc
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

from hex_llm import LLM, Config, SamplingParams
from hex_llm.engine.admission import new_request
from hex_llm.engine.carrier import AdapterHere, AdapterLost
from hex_llm.engine.engine import Engine
from hex_llm.engine.request import FinishReason
from hex_llm.errors import (
    AdapterError,
    AdapterNotFound,
    AdapterUnavailable,
    ChatTemplateMissing,
    ConfigError,
    ContextTooLong,
    EngineDead,
    NumericalError,
    RequestError,
    ServerError,
)
from tests.checkpoints import write_llama
from tests.engine.fake_carrier import FakeCarrier
from tests.engine.fakes import FakeRunner
from tests.runner.engines import SMALL

GREEDY = SamplingParams(temperature=0, max_tokens=16)
HI = [{"role": "user", "content": "hi"}]
HO = [{"role": "user", "content": "ho"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), **SMALL)


@pytest.fixture
def poisoned(llm, monkeypatch):
    """From the fourth step on the model produces NaN."""
    dispatch, steps = llm.engine._runner.dispatch, []

    class Poisoned:
        def __init__(self, pending):
            self.pending = pending

        def read(self):
            result = self.pending.read()
            steps.append(result)
            return result if len(steps) < 4 else replace(result, finite=np.zeros_like(result.finite))

    monkeypatch.setattr(llm.engine._runner, "dispatch", lambda step: Poisoned(dispatch(step)))


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = ["one", "two", [5, 6, 7], "a longer prompt, of more than one block"]
    together = llm.generate(prompts, GREEDY, progress=False)
    for prompt, result in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY, progress=False)
        assert result.outputs[0].token_ids == alone.outputs[0].token_ids
        assert result.prompt_token_ids == (llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        assert result.outputs[0].text == llm.tokenizer.decode(result.outputs[0].token_ids)
        assert result.outputs[0].finish_reason == FinishReason.LENGTH


def test_n_answers_differ_and_are_the_same_again_by_their_seed(llm):
    sampling = SamplingParams(temperature=1.0, max_tokens=8, n=4, seed=7)
    (first,), (again,) = (llm.generate("hello", sampling, progress=False) for _ in range(2))
    answers = [tuple(output.token_ids) for output in first.outputs]
    assert len(set(answers)) == 4
    assert answers == [tuple(output.token_ids) for output in again.outputs]


def test_answers_without_a_seed_differ_from_call_to_call_but_not_from_start_to_start(folder):
    sampling = SamplingParams(temperature=1.0, max_tokens=8)
    first, again = (
        [llm.generate("hello", sampling, progress=False)[0].outputs[0].token_ids for _ in range(2)]
        for llm in (LLM(str(folder), **SMALL), LLM(str(folder), **SMALL))
    )
    assert first[0] != first[1]
    assert first == again


def test_without_max_tokens_an_answer_goes_on_to_the_end_of_the_context(llm):
    for prompt in ([5] * 3, [5] * 90, [5] * 95):
        (result,) = llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True), progress=False)
        assert len(result.outputs[0].token_ids) == 96 - len(prompt)


def test_prompts_of_tokens_may_be_of_numpy(llm):
    (plain,) = llm.generate([5, 6, 7], GREEDY, progress=False)
    (array,) = llm.generate(np.array([5, 6, 7]), GREEDY, progress=False)
    assert array == plain
    assert {type(token) for token in array.prompt_token_ids} == {int}


def test_logprobs_are_there_for_every_token_where_they_were_asked_for(llm):
    sampling = SamplingParams(temperature=0, max_tokens=9, logprobs=2)
    (result,) = llm.generate("hello", sampling, progress=False)
    assert [entry.rank for entry in result.outputs[0].logprobs] == [1] * 9
    assert llm.generate("hello", GREEDY, progress=False)[0].outputs[0].logprobs is None


def test_cached_tokens_are_those_that_the_first_answer_found(folder):
    llm = LLM(str(folder), **SMALL | {"enable_prefix_cache_hbm": True, "max_decode_seqs": 1, "prefill_len_padding": 8})
    sampling = SamplingParams(temperature=0, max_tokens=2, n=3)
    first, again = (llm.generate([7] * 20, sampling, progress=False)[0].num_cached_tokens for _ in range(2))
    assert (first, again) == (0, 16)


# Calls in between calls


def test_streams_may_be_read_by_turns_and_other_calls_made_in_between(llm):
    whole = [llm.chat(messages, GREEDY, progress=False)[0].outputs[0].text for messages in (HI, HO)]
    assert whole[0] != whole[1]
    streams = [llm.stream_chat(messages, GREEDY) for messages in (HI, HO)]
    texts = [next(stream) for stream in streams]
    assert llm.chat(HO, GREEDY, progress=False)[0].outputs[0].text == whole[1]
    texts[0] += next(streams[0], "")
    assert [result.outputs[0].text for result in llm.chat([HI, HO], GREEDY, progress=False)] == whole
    texts[1] += "".join(streams[1])
    texts[0] += "".join(streams[0])
    assert texts == whole
    assert not llm.engine.has_work
    assert not llm._under_way


def test_a_stream_that_is_left_while_another_goes_on_ends_its_request_alone(llm):
    (whole,) = llm.chat(HO, GREEDY, progress=False)
    left, kept = llm.stream_chat(HI, SamplingParams(temperature=0)), llm.stream_chat(HO, GREEDY)
    next(left)
    text = next(kept)
    left.close()
    assert llm.engine.stats().running == 1
    assert text + "".join(kept) == whole.outputs[0].text
    assert not llm.engine.has_work
    llm.engine.check()


def test_a_forgotten_stream_that_is_collected_in_the_middle_of_a_step_does_no_harm(llm, monkeypatch):
    (whole,) = llm.chat(HO, GREEDY, progress=False)
    forgotten = llm.stream_chat(HI, SamplingParams(temperature=0, ignore_eos=True))
    next(forgotten)
    (forgotten_id,) = llm._under_way
    take = llm.engine._scheduler._take

    def collecting(plan, request, *arguments, **options):
        if request.id == forgotten_id and gone():
            gc.collect()
        take(plan, request, *arguments, **options)

    monkeypatch.setattr(llm.engine._scheduler, "_take", collecting)
    gc.disable()
    try:
        gone = weakref.ref(forgotten)
        cycle = [forgotten]
        cycle.append(cycle)
        del forgotten, cycle
        assert "".join(llm.stream_chat(HO, GREEDY)) == whole.outputs[0].text
        assert gone() is None
    finally:
        gc.enable()
    assert not llm.engine.has_work
    llm.engine.check()


def test_an_interrupted_call_leaves_an_llm_that_works(llm, monkeypatch):
    (whole,) = llm.chat(HI, GREEDY, progress=False)
    stream = llm.stream_chat(HI, GREEDY)
    text = next(stream)
    dispatch, interrupts = llm.engine._runner.dispatch, [KeyboardInterrupt]

    class Interrupted:
        def __init__(self, pending):
            self.pending = pending

        def read(self):
            if interrupts:
                raise interrupts.pop()
            return self.pending.read()

    monkeypatch.setattr(llm.engine._runner, "dispatch", lambda step: Interrupted(dispatch(step)))
    with pytest.raises(KeyboardInterrupt):
        llm.chat([HI, HO], GREEDY, progress=False)
    assert text + "".join(stream) == whole.outputs[0].text
    assert not llm.engine.has_work
    llm.engine.check()


def test_what_a_step_fails_with_is_passed_on_and_later_calls_say_that_the_engine_is_dead(folder):
    llm = LLM(str(folder), **SMALL)

    def dispatch(step):
        raise RuntimeError("no more device")

    llm.engine._runner.dispatch = dispatch
    with pytest.raises(RuntimeError, match="no more device"):
        llm.generate("x", GREEDY, progress=False)
    for _ in range(2):
        with pytest.raises(EngineDead, match="RuntimeError: no more device"):
            llm.generate("x", GREEDY, progress=False)
    with pytest.raises(EngineDead):
        next(llm.stream_chat(HI, GREEDY))


# Adapters that are on their way


@pytest.fixture
def adapted(llm, monkeypatch):
    """All that is asked of it names an adapter, and its runner has no model."""
    limits = replace(llm.engine.limits, num_adapters=1)
    monkeypatch.setattr(llm, "engine", Engine(FakeRunner(limits), limits, carrier=FakeCarrier()))
    named = {"adapter": "a", "adapter_source": "gs://adapters/a"}
    monkeypatch.setattr("hex_llm.llm.new_request", lambda *values, **more: new_request(*values, **more | named))
    return llm


def test_a_call_waits_for_an_adapter_without_looking_again_and_again(llm, adapted, monkeypatch):
    step, steps = llm.engine.step, []

    def counted():
        steps.append("step")
        return step()

    monkeypatch.setattr(llm.engine, "step", counted)
    timer = threading.Timer(0.2, llm.hear, [AdapterHere("a", "a")])
    timer.start()
    (result,) = llm.generate("hello", SamplingParams(max_tokens=16, ignore_eos=True), progress=False)
    timer.join()
    assert len(result.outputs[0].token_ids) == 16
    assert len(steps) < 30
    assert llm.engine.stats().total_adapter_loads == 1
    llm.engine.check()


def test_answers_whose_adapter_cannot_be_had_say_so(llm, adapted):
    threading.Timer(0.05, llm.hear, [AdapterLost("a", "It is no adapter.", "adapter_invalid", 400)]).start()
    results = llm.generate(["hello", "ho"], GREEDY, progress=False)
    for result in results:
        (output,) = result.outputs
        assert (output.finish_reason, output.error, output.text) == (FinishReason.ERROR, "It is no adapter.", "")
    assert llm.engine.is_idle
    llm.engine.check()


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("adapter_invalid", 404, AdapterError),
        ("adapter_not_found", 404, AdapterNotFound),
        ("adapter_unavailable", 503, AdapterUnavailable),
        ("", 500, ServerError),
    ],
)
def test_a_stream_whose_adapter_cannot_be_had_raises_what_says_so(llm, adapted, code, status, kind):
    llm.hear(AdapterLost("a", "It cannot be had.", code, status))
    with pytest.raises(kind, match=r"It cannot be had\.") as caught:
        next(llm.stream_chat(HI, GREEDY))
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.code) == (status, code or "internal_error")
    assert llm.engine.is_idle


# A model that breaks down


def test_an_answer_that_breaks_down_says_so_and_keeps_what_came_before(llm, poisoned):
    (result,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=9, logprobs=0), progress=False)
    (output,) = result.outputs
    assert (output.finish_reason, len(output.token_ids), len(output.logprobs or [])) == (FinishReason.ERROR, 3, 3)
    assert output.error == (
        "After 3 tokens of the answer the model produced no usable number (NaN, or nothing but -inf)."
    )
    assert not llm.engine.has_work


def test_a_stream_that_breaks_down_raises_after_what_came_before(llm, poisoned):
    pieces = []
    with pytest.raises(NumericalError, match="After 3 tokens of the answer"):
        pieces.extend(llm.stream_chat(HI, GREEDY))
    assert not llm.engine.has_work


def test_a_good_answer_has_no_error(llm):
    (result,) = llm.generate("hello", GREEDY, progress=False)
    assert result.outputs[0].error is None


def test_a_stop_string_ends_the_text_before_it(llm):
    (free,) = llm.generate("hello", GREEDY, progress=False)
    text = free.outputs[0].text
    middle = next(i for i in range(3, len(text)) if text[i].isascii() and text[i : i + 2] not in text[: i + 1])
    stop = text[middle : middle + 2]
    (stopped,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=16, stop=(stop,)), progress=False)
    output = stopped.outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text[:middle], FinishReason.STOP, stop)
    assert len(output.token_ids) < 16
    llm.engine.check()
    assert not llm.engine.has_work


def test_streamed_chat_adds_up_to_the_answer(llm):
    (whole,) = llm.chat(HI, GREEDY, progress=False)
    assert "".join(llm.stream_chat(HI, GREEDY)) == whole.outputs[0].text


def test_a_stream_that_is_left_early_ends_its_request(llm):
    stream = llm.stream_chat(HI, SamplingParams(temperature=0))
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    llm.engine.check()


def test_more_than_one_answer_cannot_be_streamed(llm):
    with pytest.raises(RequestError, match="n=2 must be 1"):
        next(llm.stream_chat(HI, SamplingParams(n=2)))


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "words"),
    [
        (list(range(3, 99)), {}, ContextTooLong, ["96 tokens", "the context is 96 tokens"]),
        ([5] * 90, {"max_tokens": 7}, ContextTooLong, ["90 tokens", "max_tokens is 7", "96 tokens"]),
        ([], {}, RequestError, ["empty"]),
        ([320], {}, RequestError, ["320", "319"]),
        ([-1], {}, RequestError, ["-1"]),
        ([1, [2]], {}, RequestError, ["[1, [2]]", "whole numbers"]),
        (1.5, {}, RequestError, ["1.5", "whole numbers"]),
        ("x", {"stop": 5}, RequestError, ["stop=5"]),
        ("x", {"bad_words": [5]}, RequestError, ["bad_words", "5"]),
        ("x", {"temperature": -1.0}, RequestError, ["temperature", "-1"]),
        ("x", {"temperature": float("nan")}, RequestError, ["temperature", "nan"]),
        ("x", {"top_p": 0.0}, RequestError, ["top_p"]),
        ("x", {"top_p": 1.5}, RequestError, ["top_p", "1.5"]),
        ("x", {"n": 0}, RequestError, ["n=0"]),
        ("x", {"logprobs": 21}, RequestError, ["logprobs", "21", "20"]),
        ("x", {"max_tokens": 0}, RequestError, ["max_tokens", "0"]),
        ("x", {"stop": ("",)}, RequestError, ["stop"]),
        ("x", {"logit_bias": {320: 1.0}}, RequestError, ["logit_bias", "320", "319"]),
        ("x", {"bad_words": ("  ",)}, RequestError, ["bad_words"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_and_limit(llm, prompt, sampling, error, words):
    with pytest.raises(error) as refused:
        llm.generate([prompt], SamplingParams(**{"max_tokens": 4} | sampling), progress=False)
    for word in words:
        assert word in str(refused.value)
    assert not llm.engine.has_work


def test_prompts_that_are_none_are_refused(llm):
    with pytest.raises(RequestError, match="prompts=5 must be a text"):
        llm.generate(5)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"model": "elsewhere"}, "model='elsewhere'"), ({"max_model_len": 8, "seed": 1}, "max_model_len=8, seed=1")],
)
def test_settings_beside_a_config_are_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=f"given with it, {words} would be ignored"):
        LLM(config=Config(), **given)


def test_one_bad_prompt_of_several_leaves_nothing_behind(llm):
    with pytest.raises(RequestError):
        llm.generate(["fine", [999]], GREEDY, progress=False)
    assert not llm.engine.has_work


def test_a_context_beyond_the_models_is_refused_by_both_numbers(tmp_path):
    folder = write_llama(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"--max_model_len=513.*512"):
        LLM(str(folder), max_model_len=513)


def test_a_model_without_a_chat_template_generates_but_does_not_chat(tmp_path):
    folder = write_llama(tmp_path / "model")
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("chat_template", "chat_no_template"))
    llm = LLM(str(folder), **SMALL)
    with pytest.raises(ChatTemplateMissing):
        llm.chat(HI)
