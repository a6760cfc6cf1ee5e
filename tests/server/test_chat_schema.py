"""Bodies of /v1/chat/completions: what is taken, what it means, and how the rest is refused."""

import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import completion_create_params

from hex_llm.config import Config
from hex_llm.engine.sampling import SamplingParams
from hex_llm.errors import RequestError, Unsupported
from hex_llm.server.chat_schema import FIELDS, ChatRequest, openapi, read_chat
from hex_llm.server.fields import Rules, read_fields
from hex_llm.server.sampling_fields import SAMPLING, read_sampling
from hex_llm.text.chat import check_messages

CONFIG = Config()
HELLO = {"role": "user", "content": "Hello"}


def read(config: Config = CONFIG, defaults: dict[str, Any] | None = None, **fields: Any) -> ChatRequest:
    return read_chat({"messages": [HELLO], **fields}, config, defaults or {})


def refusal(config: Config = CONFIG, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(config, **fields)
    return caught.value


def test_messages_alone_make_a_request():
    request = read()
    assert request.messages == [HELLO]
    assert request.sampling == SamplingParams()
    assert (request.model, request.stream, request.include_usage, request.cache_salt) == (None, False, None, None)
    assert request.add_generation_prompt
    assert not request.continue_final_message


def test_null_is_the_same_as_leaving_a_field_out():
    assert read(**dict.fromkeys(FIELDS.keys() - {"messages"})) == read()


def test_what_is_sent_overrides_what_the_model_recommends():
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": None}
    sampling = read(defaults=defaults, top_p=0.5, temperature=None).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.6, 0.5, 20, 1.0)


def test_every_sampling_field_arrives():
    fields = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": -0.5, "frequency_penalty": 0.5, "bad_words": ["no"], "min_tokens": 3, "max_tokens": 9,
        "stop": ["a", "b"], "stop_token_ids": [4, 5], "include_stop_str_in_output": True, "ignore_eos": True,
        "skip_special_tokens": False, "seed": -5,
    }  # fmt: skip
    sampling = read(**fields, logit_bias={"267": -100, "0": 1.5}, logprobs=True, top_logprobs=3).sampling
    assert sampling == SamplingParams(**fields, logit_bias={267: -100, 0: 1.5}, logprobs=3)


def test_a_stop_string_may_stand_alone():
    assert read(stop="END").sampling.stop == ("END",)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 9, "max_completion_tokens": 9}, 9),
    ],
)
def test_the_limit_of_tokens_has_two_names(fields, expected):
    assert read(**fields).sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs_are_asked_for_by_two_fields(fields, expected):
    assert read(**fields).sampling.logprobs == expected


@pytest.mark.parametrize(
    ("options", "include_usage", "continuous"),
    [
        (None, None, False),
        ({}, False, False),
        ({"include_usage": None}, False, False),
        ({"include_usage": True, "include_obfuscation": False}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
def test_stream_options_say_where_usage_is_told(options, include_usage, continuous):
    request = read(stream=True, stream_options=options)
    assert (request.include_usage, request.continuous_usage_stats) == (include_usage, continuous)


def test_a_message_that_is_continued_has_no_generation_prompt():
    request = read(continue_final_message=True)
    assert request.continue_final_message
    assert not request.add_generation_prompt
    assert not read(add_generation_prompt=False).add_generation_prompt


def test_prompt_logprobs_need_their_flag():
    assert "--enable_prompt_logprobs" in str(refusal(prompt_logprobs=1))
    request = read(Config(enable_prompt_logprobs=True), prompt_logprobs=2)
    assert (request.prompt_logprobs, request.sampling.prompt_logprobs) == (2, 2)


def test_messages_lose_their_nulls_and_keep_the_rest():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "annotations": [], "function_call": None},
    ]
    kept = read(messages=messages).messages
    assert kept[2] == {"role": "assistant", "tool_calls": [call]}
    assert check_messages(kept)[0] == messages[0]
    assert [kept[0], kept[1], kept[3]] == [messages[0], messages[1], messages[3]]


HARMLESS = [
    {"user": "u" * 256}, {"metadata": {"a": "b"}}, {"store": False}, {"service_tier": "auto"}, {"tools": []},
    {"service_tier": "default"}, {"tool_choice": "none"}, {"tool_choice": "auto"}, {"parallel_tool_calls": True},
    {"functions": []}, {"function_call": "none"}, {"response_format": {"type": "text"}}, {"modalities": ["text"]},
    {"prompt_cache_key": "k"}, {"safety_identifier": "s"}, {"priority": 0}, {"request_id": "a.b-C_1"}, {"echo": False},
    {"best_of": 1}, {"n": 3, "best_of": 3}, {"use_beam_search": False}, {"length_penalty": 1.0}, {"model": ""},
    {"spaces_between_special_tokens": True}, {"verbosity": "medium"}, {"add_special_tokens": False}, {"stop": []},
    {"logits_processors": []}, {"top_k": -1}, {"seed": 2**63 - 1}, {"n": 128}, {"logit_bias": {}}, {"temperature": 0},
]  # fmt: skip


@pytest.mark.parametrize("fields", HARMLESS, ids=str)
def test_values_that_ask_for_nothing_are_taken(fields):
    read(**fields)


# The fields, the parameter that is named, and words of the message.
WRONG = [
    ({"temperature": -0.1}, "temperature", "temperature=-0.1 must be a number, at least 0 and at most 100"),
    ({"temperature": "1"}, "temperature", "'1'"),
    ({"temperature": True}, "temperature", "=true"),
    ({"temperature": [1.0]}, "temperature", "a list of 1"),
    ({"temperature": 1e300}, "temperature", "at most 100"),
    ({"temperature": 10**400}, "temperature", "at most 100"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.01}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "from -1"),
    ({"top_k": 1.0}, "top_k", "whole number"),
    ({"top_k": True}, "top_k", "whole number"),
    ({"min_p": 2}, "min_p", "at most 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "at least 0.01"),
    ({"repetition_penalty": 1e39}, "repetition_penalty", "at most 100"),
    ({"presence_penalty": 2.1}, "presence_penalty", "at most 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "at least -2"),
    ({"max_tokens": 0}, "max_tokens", "from 1"),
    ({"max_tokens": -1}, "max_tokens", "from 1"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"max_tokens": 2**31}, "max_tokens", "2147483647"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "from 1"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "give one"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "more than max_tokens=4"),
    ({"n": 0}, "n", "from 1"),
    ({"n": 129}, "n", "128 (--max_n)"),
    ({"n": 10**9}, "n", "--max_n"),
    ({"stop": ["a"] * 5}, "stop", "4 (--max_stop_strings)"),
    ({"stop": ""}, "stop", "1 to 1024 (--max_stop_length) characters"),
    ({"stop": ["a", 1]}, "stop[1]", "string"),
    ({"stop": {"a": 1}}, "stop", "a string or a list of strings"),
    ({"stop": "x" * 2000}, "stop", "2000 characters"),
    ({"bad_words": "word"}, "bad_words", "a list of strings"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "from 0"),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]", "'2'"),
    ({"stop_token_ids": [0] * 1025}, "stop_token_ids", "1025 entries"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "key 'x'"),
    ({"logit_bias": {"07": 1}}, "logit_bias", "key '07'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "key '-1'"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "keys are tokens"),
    ({"logit_bias": {"9" * 10: 1}}, "logit_bias", "keys are tokens"),
    ({"logit_bias": {"7": 101}}, "logit_bias.7", "at most 100"),
    ({"logit_bias": {"7": None}}, "logit_bias.7", "null"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "1025 entries"),
    ({"logit_bias": [1]}, "logit_bias", "an object"),
    ({"seed": 2**63}, "seed", "whole number"),
    ({"seed": 1.0}, "seed", "whole number"),
    ({"logprobs": 1}, "logprobs", "true or false"),
    ({"top_logprobs": 5}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20 (--max_logprobs)"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "from 0"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0"),
    ({"ignore_eos": 1}, "ignore_eos", "true or false"),
    ({"stream": "true"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    ({"stream": True, "stream_options": True}, "stream_options", "an object"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "include_usage is not",
    ),
    ({"user": "u" * 257}, "user", "256 characters"),
    ({"user": 5}, "user", "string"),
    ({"cache_salt": ""}, "cache_salt", "1 to 256"),
    ({"request_id": "a b"}, "request_id", "letters"),
    ({"metadata": "x"}, "metadata", "an object"),
    ({"model": 5}, "model", "string"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "both true"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    ({"messages": None}, "messages", "missing"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "Hello"}, "messages", "'Hello'"),
    ({"messages": HELLO}, "messages", "an object"),
    ({"messages": [HELLO] * 4097}, "messages", "4096 (--max_messages)"),
    ({"messages": ["Hello"]}, "messages[0]", "an object with role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [HELLO, {"role": "god", "content": "x"}]}, "messages[1].role", "'god'"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "one of system"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string or a list"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "an object"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "string"),
    ({"messages": [{"role": "user", "tool_calls": [{}]}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]", "an object"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name", "string"),
]

# Known, but there is no such part; or not known at all.
UNSUPPORTED = [
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not a field"),
    ({"best_of": 2}, "best_of", "best_of=2 is not n=1"),
    ({"tools": [{"type": "function"}]}, "tools", "tools does not exist"),
    ({"tool_choice": "required"}, "tool_choice", "'required'"),
    ({"functions": [{}]}, "functions", "tools"),
    ({"function_call": {"name": "f"}}, "function_call", "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format", 'only {"type": "text"} is'),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "schema"),
    ({"response_format": "text"}, "response_format", "'text'"),
    ({"modalities": ["text", "audio"]}, "modalities", "text only"),
    ({"audio": {}}, "audio", "text only"),
    ({"prediction": {}}, "prediction", "not supported"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "enable_thinking"),
    ({"verbosity": "low"}, "verbosity", "not supported"),
    ({"web_search_options": {}}, "web_search_options", "web"),
    ({"store": True}, "store", "not kept"),
    ({"store": 0}, "store", "not supported"),
    ({"service_tier": "flex"}, "service_tier", "'flex'"),
    ({"moderation": {}}, "moderation", "moderated"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "never from a request"),
    ({"guided_json": {}}, "guided_json", "grammar"),
    ({"guided_regex": "a"}, "guided_regex", "grammar"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs", "grammar"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "never cut"),
    ({"use_beam_search": True}, "use_beam_search", "beam"),
    ({"length_penalty": 0.5}, "length_penalty", "beam"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", "logit_bias"),
    ({"logits_processors": ["os.system"]}, "logits_processors", "code"),
    ({"documents": [{}]}, "documents", "messages"),
    ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "text"),
    ({"kv_transfer_params": {}}, "kv_transfer_params", "KV"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "not supported"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "decodes"),
    ({"priority": 1}, "priority", "order"),
    ({"priority": False}, "priority", "not supported"),
    ({"echo": True}, "echo", "/v1/completions"),
    ({"add_special_tokens": True}, "add_special_tokens", "template"),
    ({"prompt": "x"}, "prompt", "/v1/completions"),
    ({"max_tokns": 5}, "max_tokns", "did you mean max_tokens?"),
    ({"Temperature": 5}, "Temperature", "did you mean temperature?"),
    ({"extra_body": {}}, "extra_body", "'extra_body' is not a field"),
    ({"x" * 5000: 5}, "x" * 60, "5000 characters"),
    ({"messages": [{**HELLO, "cache": 1}]}, "messages[0].cache", "not a field"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "'image_url'",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]},
        "messages[0].content[0]",
        "'y'",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_refused_by_name(fields, param, words):
    error = refusal(Config(enable_prompt_logprobs=True), **fields)
    assert (error.param, error.status, error.code) == (param, 400, None)
    assert words in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(("fields", "param", "words"), UNSUPPORTED, ids=lambda value: str(value)[:40])
def test_what_does_not_exist_is_refused_by_name(fields, param, words):
    error = refusal(**fields)
    assert isinstance(error, Unsupported)
    assert (error.param, error.code) == (param, "unsupported_parameter")
    assert words in str(error)
    assert len(str(error)) < 400


def test_limits_are_those_of_the_flags():
    config = Config(max_n=3, max_stop_strings=1, max_messages=1, max_logprobs=2, max_sequences=2)
    assert "3 (--max_n)" in str(refusal(config, n=4))
    assert "2 (--max_sequences)" in str(refusal(config, n=3))
    assert "1 (--max_stop_strings)" in str(refusal(config, stop=["a", "b"]))
    assert "1 (--max_messages)" in str(refusal(config, messages=[HELLO, HELLO]))
    assert "2 (--max_logprobs)" in str(refusal(config, logprobs=True, top_logprobs=3))


def test_prompt_logprobs_are_not_streamed():
    error = refusal(Config(enable_prompt_logprobs=True), prompt_logprobs=1, stream=True)
    assert error.param == "prompt_logprobs"


def test_every_field_that_openai_documents_is_known():
    documented = {
        name
        for kind in (
            completion_create_params.CompletionCreateParamsBase,
            completion_create_params.CompletionCreateParamsStreaming,
        )
        for name in inspect.get_annotations(kind)
    }
    assert len(documented) > 30
    assert documented - FIELDS.keys() == set()


def test_whole_numbers_may_be_floats_only_where_that_is_said():
    values = {"max_tokens": 50.0, "top_k": 1.0, "stop_token_ids": [3.0, 4]}
    read_values = read_fields(values, SAMPLING, Rules(CONFIG, integral_floats=True))
    sampling = read_sampling(read_values, CONFIG, {})
    assert (sampling.max_tokens, sampling.top_k, sampling.stop_token_ids) == (50, 1, (3, 4))
    assert type(sampling.max_tokens) is type(sampling.stop_token_ids[0]) is int
    for bad in (50.5, float("inf"), float("nan"), True):
        with pytest.raises(RequestError):
            read_fields({"max_tokens": bad}, SAMPLING, Rules(CONFIG, integral_floats=True))


def test_the_schema_names_every_field_with_its_limits():
    schema = openapi(Config(max_n=7))
    assert schema["properties"].keys() == FIELDS.keys()
    assert schema["required"] == ["messages"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 7}
    assert all(each["description"] for each in schema["properties"].values())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
ROLE = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
PART = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)})
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE, "content": st.text(max_size=5) | st.lists(PART | JSON, max_size=3) | JSON},
    optional=dict.fromkeys(("name", "tool_calls", "tool_call_id", "refusal", "other"), JSON),
)
BODY = st.builds(
    lambda messages, others: {**others, "messages": messages},
    st.lists(MESSAGE, max_size=3) | JSON,
    st.dictionaries(st.sampled_from([*FIELDS, "other"]), JSON, max_size=4),
)


def outcome(body: dict[str, Any]) -> ChatRequest | RequestError:
    try:
        return read_chat(body, Config(enable_prompt_logprobs=True), {"temperature": 0.7})
    except RequestError as error:
        return error


@given(BODY)
@settings(max_examples=400, deadline=None)
def test_a_body_is_answered_with_a_request_or_a_refusal_and_nothing_else(body):
    result = outcome(body)
    if isinstance(result, ChatRequest):
        check_messages(result.messages)
    else:
        assert len(str(result)) < 1000


SIMPLE = st.sampled_from([1, 0, "a", [], {}, True, False, -1.5, [1], ["a"]])


@given(st.sampled_from(sorted(FIELDS.keys() - {"messages"})), JSON | SIMPLE)
@settings(max_examples=600, deadline=None)
def test_a_single_field_is_taken_or_named(name, value):
    result = outcome({"messages": [HELLO], name: value})
    assert isinstance(result, ChatRequest) or result.param.startswith(name)
