"""The APIs that a server can be measured through: what is sent, and what its answer means.

An answer is read by a reader, which is fed the body as it comes and says how many tokens' worth of chunks were in it.
"""

import codecs
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from hex_llm.bench.prompt import Prompt


class AnswerError(Exception):
    """The server's answer is an error, or no answer to the request."""


class AnswerReader(Protocol):
    """Reads one answer. `input_tokens` and `output_tokens` stay None unless the server tells them."""

    texts: list[str]
    input_tokens: int | None
    output_tokens: int | None

    def feed(self, data: bytes) -> tuple[int, bool]:
        """The number of chunks with tokens in these bytes, and whether there was anything of the answer at all."""
        ...

    def close(self) -> None:
        """Called at the end of the body; raises AnswerError where the answer is not complete."""
        ...


class EventReader:
    """Server-sent events of OpenAI's API, whose end is `[DONE]`."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self._rest = b""
        self._done = False
        self._head = b""  # where it is no events, to be shown

    def feed(self, data: bytes) -> tuple[int, bool]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        chunks, anything = 0, False
        for line in lines:
            if not line.startswith(b"data:"):
                if not self.texts and len(self._head) < 1000:
                    self._head += line
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self._done = True
                continue
            event = _object(payload)
            try:
                if usage := event.get("usage"):
                    self._count(usage)
                if choices := event.get("choices"):
                    anything = True
                    chunks += self._choice(choices[0])
            except (AttributeError, TypeError, KeyError):
                raise AnswerError(f"The stream has a chunk of another shape: {_shown(str(event))}") from None
        return chunks, anything

    def _choice(self, choice: dict[str, Any]) -> bool:
        """Whether a choice carries tokens. One without text may: half a character is not shown until it is whole."""
        delta = choice.get("delta")
        if delta is None:
            text, first = choice.get("text"), False
        else:
            text, first = delta.get("content"), "role" in delta
            text = text or delta.get("reasoning_content") or delta.get("reasoning")
        if text:
            self.texts.append(text)
            return True
        return not first and choice.get("finish_reason") is None

    def _count(self, usage: dict[str, Any]) -> None:
        self.input_tokens = int(usage.get("prompt_tokens", 0)) or None
        self.output_tokens = int(usage["completion_tokens"])

    def close(self) -> None:
        if self._done:
            return
        whole = self._head + self._rest
        if whole.lstrip().startswith(b"{"):
            _object(whole)
        raise AnswerError("The stream ended without [DONE].")


class DocumentReader:
    """JSON objects with `predictions`, one after the other, with or without a NUL between them."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> tuple[int, bool]:
        self._rest = (self._rest + self._decoder.decode(data)).lstrip(_BETWEEN)
        chunks = 0
        while self._rest:
            try:
                document, end = _JSON.raw_decode(self._rest)
            except (ValueError, RecursionError):  # the rest of it has not come yet
                break
            self._rest = self._rest[end:].lstrip(_BETWEEN)
            chunks += self._document(document)
        return chunks, chunks > 0

    def _document(self, document: Any) -> bool:
        _check(document)
        predictions = document.get("predictions")
        if not isinstance(predictions, list) or not predictions or not isinstance(predictions[0], str):
            raise AnswerError("The answer has no text in predictions.")
        self.texts.append(predictions[0])
        counts = document.get("output_token_counts")
        if isinstance(counts, list) and counts:
            self.output_tokens = (self.output_tokens or 0) + counts[0]
        return True

    def close(self) -> None:
        if self._rest:
            raise AnswerError(f"The answer is not JSON: {_shown(self._rest)}")
        if not self.texts:
            raise AnswerError("The answer is empty.")


_JSON = json.JSONDecoder()
_BETWEEN = "\0 \r\n\t"


@dataclass(frozen=True, slots=True)
class Backend:
    endpoint: str
    body: Callable[[Prompt, str], dict[str, Any]]  # of a prompt and the model's name
    reader: Callable[[], AnswerReader]
    names_model: bool = True
    takes_token_ids: bool = False
    streams: bool = True
    wraps: bool = False  # the whole body is one of Vertex's instances
    tells_usage: bool = True  # where it does not, answers that ignore end tokens are known to have their full length

    def message(self, prompt: Prompt, model: str, options: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
        """The body of a request: options are sampling parameters, `extra` replaces whatever else there is."""
        body = self.body(prompt, model) | {**options, **extra}
        return orjson.dumps({"instances": [body]} if self.wraps else body)


def _completion(prompt: Prompt, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt.content,
        "max_tokens": prompt.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _chat(prompt: Prompt, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt.content}],
        "max_completion_tokens": prompt.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _generate(prompt: Prompt, model: str) -> dict[str, Any]:
    return {"prompt": prompt.content, "max_tokens": prompt.output_tokens}


def _generate_in_chunks(prompt: Prompt, model: str) -> dict[str, Any]:
    return _generate(prompt, model) | {"streaming_tokens": 1}


def _generate_stream(prompt: Prompt, model: str) -> dict[str, Any]:
    return _generate(prompt, model) | {"stream": True}


_OPENAI = Backend("/v1/completions", _completion, EventReader, takes_token_ids=True)
_GENERATE = Backend("/generate", _generate_in_chunks, DocumentReader, names_model=False, tells_usage=False)

BACKENDS: Mapping[str, Backend] = {
    "openai": _OPENAI,
    "vllm": _OPENAI,
    "openai-chat": Backend("/v1/chat/completions", _chat, EventReader),
    "generate": _GENERATE,
    "hex-llm": _GENERATE,
    "generate-stream": Backend("/generate", _generate_stream, DocumentReader, names_model=False, tells_usage=False),
    "vertex": Backend(
        "/generate", _generate, DocumentReader, names_model=False, tells_usage=False, streams=False, wraps=True
    ),
}


def error_of(status: int, body: bytes) -> str:
    """What an answer with an error status says, in one line."""
    try:
        _object(body)
    except AnswerError as error:
        return f"HTTP {status}: {error}"
    return f"HTTP {status}: {_shown(body.decode(errors='replace'))}"


def _object(text: bytes) -> dict[str, Any]:
    """The JSON object in `text`; raises AnswerError where there is none or where it tells of an error."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise AnswerError(f"The answer is not JSON: {_shown(text.decode(errors='replace'))}") from None
    _check(value)
    return value


def _check(value: Any) -> None:
    if not isinstance(value, dict):
        raise AnswerError(f"The answer is not a JSON object: {_shown(str(value))}")
    error = value.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        raise AnswerError(_shown(str(message or error)))


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]}..."
