"""The engine with its text side: what LLM.generate and LLM.chat promise."""

import pytest

from hex_llm import LLM, SamplingParams
from hex_llm.engine.request import FinishReason
from hex_llm.errors import ChatTemplateMissing, ConfigError, ContextTooLong, RequestError
from tests.checkpoints import write_llama
from tests.runner.engines import SMALL

GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(str(write_llama(tmp_path_factory.mktemp("model"))), **SMALL)


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


def test_answers_without_a_seed_differ_from_call_to_call_but_not_from_start_to_start(llm):
    sampling = SamplingParams(temperature=1.0, max_tokens=8)
    results = [llm.generate("hello", sampling, progress=False)[0].outputs[0].token_ids for _ in range(2)]
    assert results[0] != results[1]


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
    messages = [{"role": "user", "content": "hi"}]
    (whole,) = llm.chat(messages, GREEDY, progress=False)
    assert "".join(llm.stream_chat(messages, GREEDY)) == whole.outputs[0].text


def test_a_stream_that_is_left_early_ends_its_request(llm):
    stream = llm.stream_chat([{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=None))
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    llm.engine.check()


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "words"),
    [
        (list(range(3, 99)), {}, ContextTooLong, ["96 tokens", "the context is 96 tokens"]),
        ([5] * 90, {"max_tokens": 7}, ContextTooLong, ["90 tokens", "max_tokens is 7", "96 tokens"]),
        ([], {}, RequestError, ["empty"]),
        ([320], {}, RequestError, ["320", "319"]),
        ([-1], {}, RequestError, ["-1"]),
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
        llm.chat([{"role": "user", "content": "hi"}])
