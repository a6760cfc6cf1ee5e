import asyncio
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hex_llm.errors import (
    EngineDead,
    NumericalError,
    Overloaded,
    RequestError,
    ServerError,
    StartError,
    TooLarge,
    Unavailable,
)
from hex_llm.server.errors_json import MAX_BYTES, error_body, error_headers, error_object, told
from hex_llm.server.json_body import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, parse_object, read_object

DEPTH = 100


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return b'{"a":' + opening * (depth - 1) + b"1" + closing * (depth - 1) + b"}"


def test_an_object_is_read():
    assert parse_object(b' {"a": [1, 2.5, null, true, "\xc3\xa9\\n\\ud83d\\ude00"]} ', DEPTH) == {
        "a": [1, 2.5, None, True, "é\n😀"]
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is empty"),
        (b" \r\n\t", "is empty"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'\xff\xfe{\0"\0', "byte order mark"),
        (b"[]", "not a list"),
        (b'"a"', "not a string"),
        (b"1", "not a number"),
        (b"1.5", "not a number"),
        (b"true", "not true or false"),
        (b"null", "not null"),
        (b"{", "not valid JSON"),
        (b"{}{}", "not valid JSON"),
        (b"{'a': 1}", "line 1, column 2"),
        (b'{"a": 1,}', "not valid JSON"),
        (b'{"a": 01}', "not valid JSON"),
        (b'{"a": NaN}', "line 1, column 7"),
        (b'{"a": Infinity}', "not valid JSON"),
        (b'{"a": -Infinity}', "not valid JSON"),
        (b'{"a": 1e999}', "not valid JSON"),
        (b'{\n"a": "\\ud800"}', "line 2"),
        (b'{"a": "\\q"}', "not valid JSON"),
        (b'{"a": "\x01"}', "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8: byte 7"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b"<html>" + b"x" * 1000, "not valid JSON"),
    ],
)
def test_what_is_no_object_is_refused(body, words):
    with pytest.raises(RequestError) as caught:
        parse_object(body, DEPTH)
    assert caught.value.status == 400
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"b":', b"}"), (b'[{"b":', b"}]")])
def test_lists_and_objects_may_be_so_deep_and_no_deeper(brackets):
    per_level = brackets[0].count(b"[") + brackets[0].count(b"{")
    assert parse_object(nested(1 + (DEPTH - 1) // per_level, *brackets), DEPTH)
    with pytest.raises(RequestError, match="within each other; 100 may be"):
        parse_object(nested(2 + DEPTH // per_level, *brackets), DEPTH)


def test_a_hundred_thousand_levels_are_refused():
    with pytest.raises(RequestError, match="100001 lists and objects within each other"):
        parse_object(nested(100_001), DEPTH)


def test_brackets_in_strings_do_not_count():
    text = '[{"' * 200 + "\\" * 7 + '"[['
    body = json.dumps({"a": text, "b\\": [text, {}], "[" * 150: 1}).encode()
    assert parse_object(body, DEPTH) == json.loads(body)
    with pytest.raises(RequestError, match="within each other"):
        parse_object(json.dumps({"a": text, "b": json.loads("[" * 100 + "]" * 100)}).encode(), DEPTH)


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.text('\\"[]{}, a\n'),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('\\"[{a'), inner, max_size=4),
        max_leaves=30,
    )
)
def test_the_depth_is_what_it_is(value):
    def depth(value) -> int:
        if isinstance(value, dict):
            value = list(value.values())
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    whole = {"a": value}
    body = json.dumps(whole, ensure_ascii=random.Random(len(str(value))).random() < 0.5).encode()
    assert parse_object(body, depth(whole)) == whole
    if depth(whole) > 1:
        with pytest.raises(RequestError, match=f"has {depth(whole)} lists and objects within"):
            parse_object(body, depth(whole) - 1)


@pytest.mark.parametrize(
    ("item", "limit", "words"),
    [
        (b"[]", MAX_CONTAINERS, "lists and objects"),
        (b"{}", MAX_CONTAINERS, "lists and objects"),
        (b'""', MAX_STRINGS, "strings"),
        (b"0", MAX_VALUES, "values"),
    ],
)
def test_there_may_be_so_many_values_and_no_more(item, limit, words):
    assert len(parse_object(b'{"a":[' + b",".join([item] * (limit - 3)) + b"]}", DEPTH)["a"]) == limit - 3
    with pytest.raises(TooLarge, match=f"more than {limit} {words}"):
        parse_object(b'{"a":[' + b",".join([item] * (limit + 2)) + b"]}", DEPTH)


def test_commas_and_brackets_of_a_long_text_do_not_count():
    text = ",[]{}'" * (MAX_VALUES // 2)
    assert parse_object(json.dumps({"a": text}).encode(), DEPTH) == {"a": text}


def test_a_large_body_is_read_in_a_thread():
    async def read() -> tuple[dict, int]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counter = asyncio.create_task(count())
        value = await read_object(b'{"a": "' + b"x" * 8_000_000 + b'"}', DEPTH)
        counter.cancel()
        return value, turns

    value, turns = asyncio.run(read())
    assert len(value["a"]) == 8_000_000
    assert turns > 0


def test_of_equal_keys_the_last_counts_and_large_integers_become_floats():
    assert parse_object(b'{"a": 1, "a": 2, "b": 18446744073709551616}', DEPTH) == {"a": 2, "b": 2.0**64}


# The error objects that bad bodies and everything else are answered with


def test_errors_of_ours_say_what_they_are():
    error = RequestError("n is 0; it must be at least 1.", param="n")
    assert error_object(error) == {
        "error": {
            "message": "n is 0; it must be at least 1.",
            "type": "invalid_request_error",
            "param": "n",
            "code": None,
        }
    }
    assert error_object(NumericalError("No number."))["error"]["code"] == "numerical_error"


@pytest.mark.parametrize(
    "error", [ValueError("/secret 0x7f"), KeyError("secret"), StartError("secret"), ServerError("secret")]
)
def test_other_errors_tell_nothing(error):
    body = error_body(told(error, "req-1"))
    assert b"se" not in body.replace(b"server_error", b"")
    assert json.loads(body)["error"]["message"] == "Internal error. Request req-1."
    assert json.loads(body)["error"]["code"] == "internal_error"
    assert told(error, "req-1").status == 500


@pytest.mark.parametrize("text", ["x" * 10**6, "\x01" * 10**6, "😀" * 10**5, "\ud800" * 10**5])
def test_an_error_is_never_large(text):
    body = error_body(RequestError(text, param=text))
    assert len(body) <= MAX_BYTES
    assert json.loads(body)["error"]["message"].endswith("...")


def test_errors_that_pass_say_when_to_try_again():
    assert error_headers(Overloaded("Full.")) == [("Retry-After", "1")]
    assert error_headers(Unavailable("Soon.", code="starting")) == [("Retry-After", "1")]
    assert error_headers(EngineDead("Dead.")) == [("Retry-After", "1")]
    assert error_headers(EngineDead("Dead.", status=500)) == []
