import contextlib
import dataclasses
import select
import socket
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hex_llm.config import Config
from hex_llm.server import pages
from hex_llm.server.app import routes
from hex_llm.server.state import Server
from tests.checkpoints import write_llama
from tests.server.bad_inputs import http, instances, json_text, limits_of_answers, messages, prompts, sampling
from tests.server.bad_inputs.case import CHAT, COMPLETIONS, GENERATE, KEY, Case, completion, head
from tests.server.refusals import check_ledger, error_of
from tests.server.servers import RunningServer, running_server
from tests.server.serving import read_answer

TABLES = (http, json_text, sampling, limits_of_answers, messages, prompts, instances)
CASES = [case for table in TABLES for case in table.CASES]
# Health, and the files of the playground, which are the same for everybody and hold no data.
OPEN = {"/ping", "/health", "/live", *pages.FILES}
PING = head("GET", "/ping")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad_inputs")
    flags = ("--served_model_name=tiny", "--head_timeout_s=1.5", "--body_timeout_s=1.5")
    model = write_llama(folder / "model")
    with running_server(model, folder / "log", *flags, keys=[KEY]) as server:
        yield server


def ask(
    server: RunningServer, pieces: tuple[bytes, ...], pause_s: float = 0.0, timeout: float = 10
) -> tuple[int, dict[str, str], bytes]:
    with socket.create_connection(("127.0.0.1", server.port), timeout) as client:
        # The server may have answered before it has read everything.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                client.sendall(piece)
                if pause_s and select.select([client], [], [], pause_s)[0]:
                    break
        return read_answer(client)


def check_refused(server: RunningServer, case: Case) -> None:
    started = time.monotonic()
    status, headers, body = ask(server, case.request, case.pause_s)
    assert time.monotonic() - started < 10
    error = error_of(body)
    expected = {"status": case.status, "type": case.type, "param": case.param, "code": case.code}
    assert {"status": status, **{name: error[name] for name in ("type", "param", "code")}} == expected, error["message"]
    assert case.says in error["message"]
    assert headers["content-type"] == "application/json"
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers
    for name, value in case.answer_headers:
        assert headers[name] == value
    assert ask(server, (PING,), timeout=2)[0] == 200


def test_there_are_at_least_250_of_them_and_no_two_are_the_same():
    assert len(CASES) >= 250
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
    assert [request for request, count in Counter(case.request for case in CASES).items() if count > 1] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_input_is_refused_with_what_is_wrong_about_it(server, case):
    check_refused(server, case)


def _streamed(case: Case) -> Case | None:
    """The same with stream: true, where that is another request with the same fault."""
    body = case.body
    if case.pieces or case.route not in (CHAT, COMPLETIONS, GENERATE) or not isinstance(body, dict):
        return None
    if case.route != GENERATE:
        changed = None if {"stream", "stream_options", "instances"} & body.keys() else body | {"stream": True}
    elif "instances" not in body:
        changed = body | {"stream": True}
    elif isinstance(body.get("parameters", {}), dict) and "stream" not in repr(body):
        changed = body | {"parameters": body.get("parameters", {}) | {"stream": True}}
    else:
        changed = None
    return dataclasses.replace(case, body=changed) if changed else None


def test_a_stream_that_is_refused_has_its_status_all_the_same(server):
    cases = [streamed for case in CASES if (streamed := _streamed(case))]
    assert len(cases) > 200
    for case in cases:
        try:
            check_refused(server, case)
        except AssertionError as error:
            raise AssertionError(f"with stream: true, {case.name}") from error


def _all_routes() -> dict[str, Any]:
    server = cast(Server, SimpleNamespace(config=Config(enable_docs=True)))
    return {**routes(server, {}), "/v1/models/tiny": SimpleNamespace(method="GET", open=False)}


def test_only_health_and_the_playgrounds_files_are_open():
    assert {path for path, route in _all_routes().items() if route.open} == OPEN


@pytest.mark.parametrize("path", _all_routes())
@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {KEY}"])
def test_every_other_route_needs_a_key(server, path, header):
    headers = [f"Authorization: {header}"] if header else []
    status, answered, body = ask(server, (head(_all_routes()[path].method, path, *headers),))
    if path in OPEN:
        assert status == 200
    else:
        assert status == 401
        assert error_of(body)["code"] == "invalid_api_key"
        assert answered["www-authenticate"] == "Bearer"


EDGES: dict[str, list[Any]] = {
    "temperature": [0, 100, 0.0, 1e-300, None],
    "top_p": [1, 1e-300, None],
    "top_k": [-1, 0, 1, 2**31 - 1, None],
    "min_p": [0, 1, None],
    "repetition_penalty": [0.01, 100, None],
    "presence_penalty": [-2, 2, None],
    "frequency_penalty": [-2, 2, None],
    "n": [1, 4, None],
    "seed": [-(2**63), 2**63 - 1, 0, None],
    "min_tokens": [0, 2, None],
    "max_tokens": [1, None],
    "stop": ["x" * 1024, ["a", "b", "c", "d"], [], None],
    "stop_token_ids": [[0, 319], [], None],
    "logit_bias": [{"0": -100, "319": 100}, {str(token): -100 for token in range(320)}, {}, None],
    "bad_words": [["a", "bcdefgh"], [], None],
    "best_of": [1, None],
    "ignore_eos": [True, None],
    "stream_options": [None],
    "response_format": [{"type": "text"}, None],
    "model": ["tiny", "", None],
    "user": ["u" * 256, None],
    "cache_salt": ["s" * 256, None],
    "suffix": ["", None],
    "logprobs": [0, 20, None],
}


@pytest.mark.parametrize("field", EDGES)
def test_a_value_at_the_edge_is_taken(server, field):
    for value in EDGES[field]:
        case = completion("", None, "", **{"seed": 1, field: value})
        status, _, body = ask(server, case.request)
        assert status == 200, (value, body)


def test_after_all_of_them_the_ledger_balances(server):
    check_ledger(server.metrics())
    assert server.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 2}).status_code == 200
