"""Errors as OpenAI's own Python package raises them: by class, code and field, and when it tries again."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hex_llm.server.supervise import SAME_SIGNAL_S
from tests.checkpoints import write_llama
from tests.server.servers import RunningServer, running_server
from tests.server.serving import wait_until

KEY = "a-key-of-the-tests"
LONG = 4096  # tokens, of an answer that is still under way when the test has done what it wants
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=LONG)


@contextlib.contextmanager
def one_at_a_time(folder: Path, log: Path, *flags: str, ready: bool = True) -> Iterator[RunningServer]:
    limits = (f"--max_model_len={LONG}", f"--num_blocks={LONG // 8}", "--max_decode_seqs=1", "--max_queued_requests=0")
    with running_server(folder, log, "--served_model_name=tiny", *limits, *flags, ready=ready, keys=[KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with one_at_a_time(folder, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


def connect(server: RunningServer, *, key: str = KEY, retries: int = 0, **others: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=retries, timeout=60, **others)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with connect(server) as opened:
        yield opened


def refused(client: openai.OpenAI, **arguments: Any) -> openai.APIStatusError:
    """What a chat with these arguments raises."""
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **arguments})
    return raised.value


def long_stream(client: openai.OpenAI) -> Any:
    """A stream that has begun, and goes on for long."""
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=LONG - 8, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    return stream


@pytest.mark.parametrize(
    ("arguments", "param", "code"),
    [
        ({"temperature": -1}, "temperature", None),
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", None),
        ({"max_tokens": LONG}, "max_tokens", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "a" * LONG}]}, "messages", "context_length_exceeded"),
        ({"extra_body": {"nonsense": 1}}, "nonsense", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type", "unsupported_parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"top_logprobs": 2}, "top_logprobs", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_names_its_field(
    client: openai.OpenAI, arguments: dict[str, Any], param: str, code: str | None, stream: bool
) -> None:
    if stream and "stream_options" in arguments:
        return  # then they are right
    error = refused(client, **arguments, **({"stream": True} if stream else {}))
    assert isinstance(error, openai.BadRequestError)
    assert (error.status_code, error.type, error.param, error.code) == (400, "invalid_request_error", param, code)
    assert error.request_id


def test_a_completion_with_a_suffix_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="a", suffix="b")
    assert raised.value.param == "suffix"


def test_who_has_a_wrong_key_or_none_is_not_authenticated(server: RunningServer) -> None:
    error = refused(connect(server, key="wrong"))
    assert isinstance(error, openai.AuthenticationError)
    assert (error.status_code, error.code) == (401, "invalid_api_key")
    assert "wrong" not in str(error)
    with pytest.raises(openai.AuthenticationError):
        connect(server, key="wrong").models.list()


def test_what_is_not_there_is_not_found(client: openai.OpenAI) -> None:
    error = refused(client, model="gpt-4")
    assert isinstance(error, openai.NotFoundError)
    assert (error.status_code, error.code, error.param) == (404, "model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="hi")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tiny", input="hi")


def test_one_request_too_many_is_a_rate_limit(client: openai.OpenAI) -> None:
    with long_stream(client):
        for stream in (False, True):
            error = refused(client, stream=stream)
            assert isinstance(error, openai.RateLimitError)
            assert (error.status_code, error.type, error.code) == (429, "rate_limit_error", "server_overloaded")
            assert int(error.response.headers["retry-after"]) >= 1


def test_a_client_that_retries_comes_again_when_it_was_told_to(server: RunningServer, client: openai.OpenAI) -> None:
    wait_until(lambda: server.metrics()["hexllm:admitted_sequences"] == 0)
    stream = long_stream(client)
    seen: list[tuple[int, float]] = []

    def note(response: httpx.Response) -> None:
        seen.append((response.status_code, time.monotonic()))
        stream.close()

    with connect(server, retries=3, http_client=httpx.Client(event_hooks={"response": [note]})) as patient:
        response = patient.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
    assert response.usage is not None
    assert [status for status, _ in seen] == [429, 200]
    assert seen[1][1] - seen[0][1] >= 1.0


def test_a_client_that_starts_with_the_server_has_its_answer_when_it_is_there(folder: Path, tmp_path: Path) -> None:
    with one_at_a_time(folder, tmp_path / "log", ready=False) as server, connect(server) as client:
        while True:
            try:
                error = refused(client)
                break
            except openai.APIConnectionError:
                time.sleep(0.02)  # nobody listens yet
        assert isinstance(error, openai.InternalServerError)
        assert (error.status_code, error.type, error.code) == (503, "server_error", "starting")
        with connect(server, retries=60) as patient:
            response = patient.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
        assert response.usage is not None
        assert response.usage.completion_tokens <= 4


def test_a_server_that_shuts_down_takes_nothing_new_and_breaks_no_stream_in_silence(
    folder: Path, tmp_path: Path
) -> None:
    with one_at_a_time(folder, tmp_path / "log") as server, connect(server) as client:
        stream = long_stream(client)
        ended: list[BaseException | None] = []

        def read() -> None:
            try:
                for _ in stream:
                    pass
                ended.append(None)
            except openai.OpenAIError as error:
                ended.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/ping").status_code == 503)
        error = refused(client)
        assert isinstance(error, openai.InternalServerError)
        assert (error.status_code, error.code) == (503, "draining")
        time.sleep(2 * SAME_SIGNAL_S)
        server.process.send_signal(signal.SIGTERM)  # no more patience with the stream
        reader.join(timeout=30)
        (broken,) = ended
        assert isinstance(broken, openai.APIError)
        assert not isinstance(broken, openai.APIConnectionError), "the stream must say why it ends"
        assert (broken.code, broken.type) == ("server_shutdown", "server_error")
