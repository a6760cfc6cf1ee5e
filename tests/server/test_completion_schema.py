"""Bodies of /v1/completions: what is taken, what it means, and how the rest is refused."""

import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params

from hex_llm.config import Config
from hex_llm.errors import RequestError, Unsupported
from hex_llm.server.completion_schema import FIELDS, CompletionRequest, openapi, read_completion

CONFIG = Config()
WITH_PROMPT_LOGPROBS = Config(enable_prompt_logprobs=True)


def read(prompt: Any = "Hello", config: Config = CONFIG, **fields: Any) -> CompletionRequest:
    return read_completion({"prompt": prompt, **fields}, config, {})


def refusal(prompt: Any = "Hello", config: Config = CONFIG, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(prompt, config, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hello", ["Hello"]),
        (["Hello"], ["Hello"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([0], [[0]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (list(range(1000)), [list(range(1000))]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_prompt_is_a_text_or_tokens_or_several(prompt, prompts):
    assert read(prompt).prompts == prompts


def test_defaults():
    request = read()
    assert (request.sampling.max_tokens, request.sampling.n, request.sampling.logprobs) == (16, 1, None)
    assert request.add_special_tokens
    assert not request.echo
    assert read(max_tokens=None).sampling.max_tokens == 16
    assert read(**dict.fromkeys(FIELDS.keys() - {"prompt"})) == request


def test_logprobs_count_the_alternatives():
    assert read(logprobs=0).sampling.logprobs == 0
    assert read(logprobs=5).sampling.logprobs == 5


def test_logprobs_with_echo_are_of_the_prompt_too_and_need_the_flag():
    error = refusal(echo=True, logprobs=1)
    assert error.param == "echo"
    assert "--enable_prompt_logprobs" in str(error)
    assert read(echo=True).sampling.prompt_logprobs is None
    request = read(config=WITH_PROMPT_LOGPROBS, echo=True, logprobs=3)
    assert (request.sampling.prompt_logprobs, request.prompt_logprobs) == (3, None)
    request = read(config=WITH_PROMPT_LOGPROBS, echo=True, logprobs=1, prompt_logprobs=4)
    assert (request.sampling.prompt_logprobs, request.prompt_logprobs) == (4, 4)


WRONG = [
    (None, {}, "prompt", "missing"),
    ("", {}, "prompt", "empty"),
    ([], {}, "prompt", "empty"),
    ([""], {}, "prompt", "empty"),
    ([[]], {}, "prompt", "empty"),
    (["a", ""], {}, "prompt[1]", "empty"),
    ([[1], []], {}, "prompt[1]", "empty"),
    (5, {}, "prompt", "a string, a list of strings"),
    ({}, {}, "prompt", "a string, a list of strings"),
    ([{}], {}, "prompt", "a string, a list of strings"),
    ([None, "a"], {}, "prompt[0]", "a string, a list of strings"),
    (["a", 1], {}, "prompt[1]", "same kind as the first"),
    ([[1], "a"], {}, "prompt[1]", "same kind as the first"),
    ([1, "a"], {}, "prompt[1]", "a token"),
    ([1, True], {}, "prompt[1]", "a token"),
    ([True], {}, "prompt[0]", "a token"),
    ([1, -1], {}, "prompt[1]", "from 0"),
    ([1, 2**31], {}, "prompt[1]", "2147483647"),
    ([1.0], {}, "prompt[0]", "a token"),
    ([1, 2**70], {}, "prompt[1]", "a token"),
    ([[1, [2]]], {}, "prompt[1]", "a token"),
    ([[1], [1, "x"]], {}, "prompt[1][1]", "a token"),
    (["a"] * 129, {}, "prompt", "128 (--max_prompts)"),
    ([[1]] * 129, {}, "prompt", "128 (--max_prompts)"),
    (["a"] * 3, {"n": 100}, "n", "300 answers; a request may have 256"),
    ("a", {"max_tokens": 0}, "max_tokens", "from 1"),
    ("a", {"max_tokens": 0, "echo": True}, "max_tokens", "from 1"),
    ("a", {"logprobs": True}, "logprobs", "whole number"),
    ("a", {"logprobs": 21}, "logprobs", "20 (--max_logprobs)"),
    ("a", {"logprobs": -1}, "logprobs", "from 0"),
    ("a", {"echo": "yes"}, "echo", "true or false"),
    ("a", {"stream_options": {}}, "stream_options", "stream is not true"),
    ("a", {"add_special_tokens": 1}, "add_special_tokens", "true or false"),
]

UNSUPPORTED = [
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"messages": []}, "messages"),
    ({"prompt_embeds": "x"}, "prompt_embeds"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"chat_template": "x"}, "chat_template"),
    ({"tools": []}, "tools"),
    ({"promt": "x"}, "promt"),
]


@pytest.mark.parametrize(("prompt", "fields", "param", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_refused_by_name(prompt, fields, param, words):
    error = refusal(prompt, **fields)
    assert (error.param, error.status, error.code) == (param, 400, None)
    assert words in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED, ids=lambda value: str(value)[:40])
def test_what_does_not_exist_is_refused_by_name(fields, param):
    error = refusal(**fields)
    assert isinstance(error, Unsupported)
    assert error.param == param
    assert param in str(error)


def test_prompts_longer_than_any_context_are_refused_before_they_are_read():
    for prompt in ([1] * (2**21 + 1), [[1] * 2**21, [None]]):
        error = refusal(prompt)
        assert (error.param, error.code) == ("prompt", "context_length_exceeded")


def test_tokens_may_be_floats_without_fraction_where_that_is_said():
    request = read_completion({"prompt": [1.0, 2], "max_tokens": 5.0}, CONFIG, {}, integral_floats=True)
    assert request.prompts == [[1, 2]]
    assert request.sampling.max_tokens == 5


def test_every_field_that_openai_documents_is_known():
    documented = {
        name
        for kind in (
            completion_create_params.CompletionCreateParamsBase,
            completion_create_params.CompletionCreateParamsStreaming,
        )
        for name in inspect.get_annotations(kind)
    }
    assert len(documented) > 15
    assert documented - FIELDS.keys() == set()


def test_the_schema_names_every_field_with_its_limits():
    schema = openapi(Config(max_prompts=5))
    assert schema["properties"].keys() == FIELDS.keys()
    assert schema["required"] == ["prompt"]
    assert schema["properties"]["prompt"]["anyOf"][2]["maxItems"] == 5
    assert "16 by default" in schema["properties"]["max_tokens"]["description"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def outcome(body: dict[str, Any], *, integral_floats: bool = False) -> CompletionRequest | RequestError:
    try:
        return read_completion(body, CONFIG, {}, integral_floats=integral_floats)
    except RequestError as error:
        return error


@given(st.dictionaries(st.sampled_from(["prompt", *FIELDS, "other"]), JSON, max_size=5))
@settings(max_examples=300, deadline=None)
def test_a_body_is_answered_with_a_request_or_a_refusal_and_nothing_else(body):
    result = outcome(body)
    assert isinstance(result, CompletionRequest) or len(str(result)) < 1000


@given(JSON | st.lists(st.integers(0, 9) | st.text(max_size=1)) | st.lists(st.lists(st.integers(-1, 9))), st.booleans())
@settings(max_examples=400, deadline=None)
def test_a_prompt_that_is_taken_is_made_of_texts_or_of_tokens(prompt, integral_floats):
    result = outcome({"prompt": prompt}, integral_floats=integral_floats)
    if isinstance(result, RequestError):
        assert result.param.startswith("prompt")
        return
    assert result.prompts
    for each in result.prompts:
        assert each
        assert isinstance(each, str) or all(type(token) is int and token >= 0 for token in each)
