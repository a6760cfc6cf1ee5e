"""What is sent to each API, and how its answers are read, however the network cuts them."""

import json

import pytest

from hex_llm.bench.backends import BACKENDS, AnswerError, DocumentReader, EventReader, error_of
from hex_llm.bench.prompt import Prompt


def event(value) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def read(reader, data: bytes, size: int | None = None) -> int:
    """Feeds the data in pieces of a size; returns the number of chunks with tokens."""
    size = size or len(data) or 1
    chunks = sum(reader.feed(data[start : start + size])[0] for start in range(0, len(data), size))
    reader.close()
    return chunks


STREAM = b"".join(
    [
        b": a comment\n\n",
        event({"choices": [{"text": "Grüße"}], "usage": None}),
        event({"choices": [{"text": "", "finish_reason": None}]}),  # half a character
        event({"choices": [{"text": " 🙂", "finish_reason": "stop"}]}),
        event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}),
        event(b"[DONE]"),
    ]
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, None])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_events_are_read_however_they_are_cut(size, ending):
    reader = EventReader()
    assert read(reader, STREAM.replace(b"\n", ending), size) == 3
    assert "".join(reader.texts) == "Grüße 🙂"
    assert (reader.input_tokens, reader.output_tokens) == (4, 3)


def test_the_first_and_the_last_chunk_of_a_chat_are_no_tokens():
    chunks = [
        {"delta": {"role": "assistant", "content": ""}, "finish_reason": None},
        {"delta": {"content": "a"}, "finish_reason": None},
        {"delta": {"reasoning_content": "b"}, "finish_reason": None},
        {"delta": {"role": "assistant", "content": "c"}, "finish_reason": None},
        {"delta": {}, "finish_reason": "stop"},
    ]
    reader = EventReader()
    data = b"".join(event({"choices": [chunk]}) for chunk in chunks) + event(b"[DONE]")
    assert read(reader, data) == 3
    assert "".join(reader.texts) == "abc"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (event({"choices": [{"text": "a"}]}), "The stream ended without [DONE]."),
        (b"", "The stream ended without [DONE]."),
        (event({"error": {"message": "The engine died."}}), "The engine died."),
        (b"event: error\n" + event({"error": {"message": "No."}}), "No."),
        (event({"error": "plain"}), "plain"),
        (b'{"error": {"message": "Not a stream."}}', "Not a stream."),
        (b'{\n "error": {"message": "Over lines."}\n}\n', "Over lines."),
        (event(b"{]"), "The answer is not JSON: {]"),
        (event(b"[1]"), "The answer is not a JSON object: [1]"),
        (event({"choices": ["a"]}), "The stream has a chunk of another shape: {'choices': ['a']}"),
        (event({"choices": {"a": 1}}), "The stream has a chunk of another shape: {'choices': {'a': 1}}"),
        (event({"usage": {"completion_tokens": None}}), "The stream has a chunk of another shape: {'usage': "),
    ],
)
def test_what_is_no_good_stream_says_why(data, message):
    with pytest.raises(AnswerError) as caught:
        read(EventReader(), data)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("size", [1, 2, 5, 33, None])
@pytest.mark.parametrize("between", ["", "\0", "\n"])
def test_documents_are_read_however_they_are_cut(size, between):
    parts = [{"predictions": [text], "output_token_counts": [1]} for text in ("Grü", "ße }{ ", '"🙂')]
    data = between.join(json.dumps(part, ensure_ascii=False) for part in parts).encode()
    reader = DocumentReader()
    assert read(reader, data, size) == 3
    assert "".join(reader.texts) == 'Grüße }{ "🙂'
    assert reader.output_tokens == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "The answer is empty."),
        (b'{"predictions": ["a"]}{"predi', 'The answer is not JSON: {"predi'),
        (b'{"predictions": ["a"]}{"error": {"message": "Died."}}', "Died."),
        (b'{"predictions": []}', "The answer has no text in predictions."),
        (b'{"predictions": {"a": 1}}', "The answer has no text in predictions."),
        (b"[1]", "The answer is not a JSON object: [1]"),
        (b"\xff\xfe", "The answer is not JSON: "),
    ],
)
def test_what_is_no_good_document_says_why(data, message):
    with pytest.raises(AnswerError) as caught:
        read(DocumentReader(), data)
    assert str(caught.value).startswith(message)


def test_an_error_status_is_told_in_one_line():
    assert error_of(429, b'{"error": {"message": "Full."}}') == "HTTP 429: Full."
    assert error_of(502, b"<html>\n bad\n</html>") == "HTTP 502: The answer is not JSON: <html> bad </html>"
    assert error_of(422, b'{"detail": "no"}') == 'HTTP 422: {"detail": "no"}'
    assert len(error_of(500, b"x" * 10_000)) < 400


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (
            "vllm",
            {
                "model": "m",
                "prompt": "hi",
                "max_tokens": 5,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0,
                "seed": 7,
            },
        ),
        (
            "openai-chat",
            {
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
                "max_completion_tokens": 5,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0,
                "seed": 7,
            },
        ),
        (
            "generate",
            {
                "prompt": "hi",
                "max_tokens": 5,
                "streaming_tokens": 1,
                "temperature": 0,
                "seed": 7,
            },
        ),
        (
            "generate-stream",
            {"prompt": "hi", "max_tokens": 5, "stream": True, "temperature": 0, "seed": 7},
        ),
        (
            "vertex",
            {"instances": [{"prompt": "hi", "max_tokens": 5, "temperature": 0, "seed": 7}]},
        ),
    ],
)
def test_bodies_are_those_of_the_api(backend, expected):
    body = BACKENDS[backend].message(Prompt("hi", 1, 5), "m", {"temperature": 0}, {"seed": 7})
    assert json.loads(body) == expected


def test_extra_fields_replace_others():
    body = BACKENDS["openai"].message(
        Prompt((1, 2), 2, 5), "m", {"temperature": 0}, {"max_tokens": 9, "temperature": 1}
    )
    assert json.loads(body)["max_tokens"] == 9
    assert json.loads(body)["temperature"] == 1
    assert json.loads(body)["prompt"] == [1, 2]
