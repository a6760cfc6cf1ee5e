"""What is refused, and in which words."""

import math

import numpy as np
import pytest

from hex_llm.engine.admission import new_request, resolve_max_output
from hex_llm.engine.request import SamplingParams
from hex_llm.engine.sampling import fold_seed
from hex_llm.errors import ConfigError, ContextTooLong, RequestError
from tests.engine.fakes import VOCAB, make_engine, make_limits, make_request

SAMPLING = SamplingParams()


def refusal(**sampling) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as refused:
        new_request("r", [1], SamplingParams(**sampling), make_limits())
    return str(refused.value), refused.value.param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("ignore_eos", "no"),
        ("skip_special_tokens", 1),
        ("stop", 5),
        ("stop", 0),
        ("stop", b"a"),
        ("bad_words", {"a": 1}),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("logit_bias", [1]),
        ("logit_bias", 0),
    ],
)
def test_a_value_of_another_kind_or_out_of_range_is_refused_by_name_and_value(name, value):
    message, param = refusal(**{name: value})
    assert message.startswith(f"{name}={value!r} must be ")
    assert param == name


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "top_k", "max_tokens", "seed"])
def test_a_number_beyond_all_others_is_refused_in_a_short_message(name):
    message, param = refusal(**{name: 2 * 10**400})
    assert message.startswith(f"{name}=20000000000")
    assert "... (401 characters) must be a" in message
    assert refusal(**{name: 10**5000})[0].startswith(f"{name}=a number of thousands of digits must be a")
    assert param == name


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 10**300},
        {"stop": None, "bad_words": None, "stop_token_ids": None, "logit_bias": None},
        {"stop_token_ids": np.array([3, 4]).tolist()},
        {"temperature": 100.0},
        {"top_p": 1},
        {"top_k": -1},
        {"repetition_penalty": 0.1},
        {"presence_penalty": -2},
        {"seed": -(2**63)},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"stop": "a"},
        {"stop": ["a"] * 16},
        {"stop_token_ids": [0, VOCAB - 1]},
        {"logit_bias": {0: -100, 39: 100.0}},
        {"max_tokens": None, "min_tokens": 5},
    ],
)
def test_what_is_at_the_limit_is_accepted(sampling):
    new_request("r", [1], SamplingParams(**sampling), make_limits())


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"stop": ["a"] * 17}, "stop has 17 entries; it may have 16."),
        ({"stop": [""]}, "stop has the entry ''; each must be a string of 1 to 1024 characters."),
        ({"stop": ["a" * 1025]}, "... (1027 characters); each must be a string of 1 to 1024"),
        ({"stop": [7]}, "stop has the entry 7; each must be a string"),
        ({"bad_words": [""]}, "bad_words has the entry ''; each must be a string"),
        ({"stop_token_ids": [40]}, "stop_token_ids has the token 40; tokens of this model go from 0 to 39."),
        ({"stop_token_ids": [[1]]}, "stop_token_ids has the token [1]; tokens of this model go from 0 to 39."),
        ({"stop_token_ids": [10**5000]}, "stop_token_ids has the token a number of thousands of digits;"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids has 1025 entries; it may have 1024."),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has the token -1; tokens of this model go from 0 to 39."),
        ({"logit_bias": {"1": 1.0}}, "logit_bias has the token '1'; tokens of this model"),
        ({"logit_bias": {1: 101}}, "logit_bias=101 must be a number, at least -100 and at most 100."),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is more than max_tokens=4."),
        ({"min_tokens": 64, "max_tokens": None}, "min_tokens=64 is more than the 63 tokens that the output"),
    ],
)
def test_a_bad_entry_is_refused_with_its_value_and_the_limit(sampling, message):
    assert message in refusal(**sampling)[0]


@pytest.mark.parametrize(
    ("bad_words", "message"),
    [
        ([[1] * 9], "bad_words has a word of 9 tokens; it must have 1 to 8."),
        ([[]], "bad_words has a word of 0 tokens"),
        ([[40]], "bad_words has the token 40"),
        ([[1]] * 1023, "logit_bias (1), bad_words (1023) and the end tokens held back by min_tokens (1) make 1025"),
    ],
)
def test_rules_that_the_device_cannot_hold_are_refused(bad_words, message):
    sampling = SamplingParams(logit_bias={1: 1}, min_tokens=1)
    with pytest.raises(RequestError) as refused:
        new_request("r", [1], sampling, make_limits(), end_ids=[2], bad_words=bad_words)
    assert message in str(refused.value)


def test_end_tokens_are_no_rules_without_min_tokens():
    sampling = SamplingParams(logit_bias={1: 1})
    new_request("r", [1], sampling, make_limits(), end_ids=[2], bad_words=[[1]] * 1023)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "changes", "error", "message"),
    [
        (0, 1, {}, RequestError, "The prompt is empty"),
        (64, None, {}, ContextTooLong, "The prompt has 64 tokens; the context is 64 tokens, and one must be left"),
        (60, 5, {}, ContextTooLong, "60 tokens and max_tokens is 5, together 65; the context is 64 tokens."),
        (16, 1, {"num_blocks": 5}, ContextTooLong, "the KV cache of 4 blocks of 4 tokens holds 16 tokens"),
        (9, 8, {"num_blocks": 5}, ContextTooLong, "together 17; the KV cache of 4 blocks of 4 tokens holds 16"),
        (16, 1, {"num_blocks": 5, "reach": 8}, ContextTooLong, "the KV cache of 4 blocks of 4 tokens holds 16 tokens"),
        (64, 1, {"num_blocks": 8, "reach": 8, "step_tokens": 8}, ContextTooLong, "the context is 64 tokens"),
        (9, 0, {}, RequestError, "max_tokens=0 must be at least 1."),
    ],
)
def test_what_does_not_fit_the_context_is_refused(num_prompt, max_tokens, changes, error, message):
    with pytest.raises(error) as refused:
        resolve_max_output(num_prompt, max_tokens, make_limits(**changes))
    assert message in str(refused.value)


def test_without_max_tokens_the_output_may_fill_the_context():
    assert resolve_max_output(60, None, make_limits()) == 4
    assert resolve_max_output(6, None, make_limits(num_blocks=5)) == 10
    assert resolve_max_output(60, 4, make_limits()) == 4


@pytest.mark.parametrize("prompt", [[1, VOCAB], [-1, 1], [2**40]])
def test_the_engine_refuses_a_token_outside_the_vocabulary(prompt):
    engine, _ = make_engine()
    with pytest.raises(RequestError, match=r"The prompt has the token -?\d+; tokens of this model go from 0 to 39"):
        engine.add(_with_prompt(prompt))
    assert not engine.has_work


def _with_prompt(prompt):
    request = make_request([1])
    request.prompt = prompt
    return request


@pytest.mark.parametrize(
    "prompt", [["a"], [1.5], [[1]], [True, False], [1, [2]], [[1], [2, 3]], [2**70], 5, None, "text"]
)
def test_a_prompt_that_is_not_tokens_is_refused_by_its_value(prompt):
    engine, _ = make_engine()
    for make in (lambda: engine.add(_with_prompt(prompt)), lambda: new_request("r", prompt, SAMPLING, make_limits())):
        with pytest.raises(RequestError, match="a list of whole numbers") as refused:
            make()
        assert repr(prompt) in str(refused.value)
        assert refused.value.param == "prompt"


def test_tokens_of_numpy_become_plain_numbers():
    prompt = new_request("r", np.array([1, 2], np.uint8), SAMPLING, make_limits()).prompt  # pyright: ignore[reportArgumentType]
    assert prompt == [1, 2]
    assert {type(token) for token in prompt} == {int}


def test_without_max_tokens_an_answer_may_go_as_far_as_the_context_allows():
    assert SAMPLING.max_tokens is None
    for length in (1, 60, 63):
        assert new_request("r", [1] * length, SAMPLING, make_limits()).max_output == 64 - length


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {50: 1.0}}, "logit_bias has the token 50"),
        ({"stop_token_ids": [50]}, "stop_token_ids has the token 50"),
        ({"min_tokens": 1, "max_tokens": 65}, "together 66; the context is 64"),
    ],
)
def test_the_engine_refuses_what_was_made_for_a_larger_one(changes, message):
    engine, _ = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.add(make_request([1], **changes))
    assert not engine.has_work


def test_the_engine_refuses_what_can_never_fit_and_an_id_in_use():
    engine, _ = make_engine()
    with pytest.raises(ContextTooLong, match="together 65; the context is 64"):
        engine.add(make_request(range(30), 35))
    engine.add(make_request([1], id="twice"))
    with pytest.raises(RequestError, match="'twice' is in use"):
        engine.add(make_request([1], id="twice"))


def test_a_request_stops_at_the_models_end_tokens_unless_they_are_ignored():
    limits = make_limits()
    sampling = SamplingParams(stop_token_ids=(7,))
    assert new_request("r", [1], sampling, limits, end_ids=[2, 3]).stop_ids == {2, 3, 7}
    sampling = SamplingParams(stop_token_ids=(7,), ignore_eos=True)
    assert new_request("r", [1], sampling, limits, end_ids=[2, 3]).stop_ids == {7}


def test_seeds_are_32_bits_and_differ_for_each_output_of_a_prompt():
    seeds = {fold_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2**32, 2**63 - 1) for index in range(100)}
    assert len(seeds) == 600
    assert all(0 <= seed < 2**32 for seed in seeds)
    limits = make_limits()
    assert new_request("r", [1], SamplingParams(seed=5), limits, seed=9).seed == fold_seed(5)
    assert new_request("r", [1], SamplingParams(), limits, seed=9, index=1).seed == fold_seed(9, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_tokens": 7}, "A step of 7 tokens is too small for 8 running requests"),
        ({"num_blocks": 1}, "num_blocks=1 must be at least 2"),
        ({"max_prefills": 0}, "max_prefills=0 must be at least 1"),
        ({"reach": 1}, "reach=1 must be at least 2"),
    ],
)
def test_limits_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_limits(**changes)


def test_an_answer_that_a_request_brings_is_checked_like_its_prompt():
    engine, _ = make_engine()
    for output, keys, words in (
        ([1, 2, 3, 4], [], "comes with 4 tokens of an answer that may have 4"),
        ([1, VOCAB], [], f"The answer has the token {VOCAB}"),
        ([-1], [], "The answer has the token -1"),
        ([1], [b"key"] * 2, "comes with 2 keys for 6 tokens"),
    ):
        request = make_request(range(5), 4)
        request.output, request.keys = output, keys
        with pytest.raises(RequestError, match=words):
            engine.add(request)
    request.output, request.keys = [1, 2, 3], [b"key"] * 2
    engine.add(request)
