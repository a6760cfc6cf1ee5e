"""What clients of OpenAI's and of vLLM's servers find on the routes, told by a server of a tiny model over HTTP."""

import importlib.metadata
import json
import math
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.checkpoints import SPECIAL_TOKENS, write_llama
from tests.monitoring.page import check_metrics
from tests.server.servers import RunningServer, running_server
from tests.server.serving import wait_until

NAMES = ("org/tiny", "tiny")
END = 2
PROMPT = {"prompt": "abcdef", "temperature": 0, "ignore_eos": True, "max_tokens": 6}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "ignore_eos": True, "max_tokens": 6}
ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_llama(tmp_path_factory.mktemp("model"))
    flags = (f"--served_model_name={','.join(NAMES)}", "--enable_prompt_logprobs", f"--cors_origins={ORIGIN}")
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(folder, log, *flags, HEX_LLM_LOG_LEVEL="info") as running:
        yield running


def complete(server: RunningServer, **others: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", {**PROMPT, **others})
    assert response.status_code == 200, response.text
    return response.json()


def chat(server: RunningServer, **others: Any) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", {**CHAT, **others})
    assert response.status_code == 200, response.text
    return response.json()


def events(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    text = server.post(path, {**body, "stream": True}).text
    assert text.endswith("\n\ndata: [DONE]\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]


def test_every_name_of_the_model_is_one_of_its_own(server: RunningServer) -> None:
    models = server.get("/v1/models").json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == list(NAMES)
    assert all(model["max_model_len"] == 256 for model in models["data"])
    for name, model in zip(NAMES, models["data"], strict=True):
        assert server.get(f"/v1/models/{name}").json() == model
        assert complete(server, model=name)["model"] == name
    assert complete(server)["model"] == NAMES[0]


def test_the_version_is_that_of_the_package(server: RunningServer) -> None:
    assert server.get("/version").json() == {"version": importlib.metadata.version("hex-llm")}


def test_health_is_told_on_every_path_that_asks_for_it(server: RunningServer) -> None:
    for path in ("/ping", "/health", "/live"):
        assert server.get(path).json() == {"status": "ready"}
        head = httpx.head(server.url + path)
        assert (head.status_code, head.content) == (200, b"")


def test_a_wrong_method_is_told_the_right_one(server: RunningServer) -> None:
    for path, allowed in (("/v1/chat/completions", "POST"), ("/v1/models", "GET"), ("/tokenize", "POST")):
        response = httpx.delete(server.url + path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed)
        assert response.json()["error"]["code"] == "method_not_allowed"


def test_docs_are_not_there_unless_asked_for(server: RunningServer) -> None:
    assert server.get("/docs").status_code == server.get("/openapi.json").status_code == 404


def test_only_pages_that_were_named_may_ask(server: RunningServer) -> None:
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    allowed = httpx.options(server.url + "/v1/chat/completions", headers={"Origin": ORIGIN, **preflight})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    other = httpx.options(server.url + "/v1/chat/completions", headers={"Origin": "https://other.example", **preflight})
    assert "access-control-allow-origin" not in other.headers
    streamed = httpx.post(server.url + "/v1/completions", json={**PROMPT, "stream": True}, headers={"Origin": ORIGIN})
    assert streamed.headers["access-control-allow-origin"] == ORIGIN
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_roles_are_what_the_template_makes_of_them(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    written = "<s>[developer]Be brief.\n[user]a\nb\n[assistant]\n[tool]42\n[assistant]"
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == written
    assert chat(server, messages=messages)["usage"]["prompt_tokens"] == len(tokens)


def test_an_answer_goes_on_with_the_last_message(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure, "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = server.post("/tokenize", body).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "<s>[user]a\n[assistant]Sure, "
    assert chat(server, **body)["usage"]["prompt_tokens"] == len(tokens)


def test_tokens_come_with_answers_that_are_asked_for_them(server: RunningServer) -> None:
    (choice,) = complete(server, return_token_ids=True)["choices"]
    prompt = server.post("/tokenize", {"prompt": PROMPT["prompt"]}).json()["tokens"]
    assert choice["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == 6
    # The same text and tokens once more, as a stream.
    chunks = [each["choices"][0] for each in events(server, "/v1/completions", {**PROMPT, "return_token_ids": True})]
    assert [token for each in chunks for token in each.get("token_ids") or ()] == choice["token_ids"]
    assert "".join(each["text"] for each in chunks) == choice["text"]


def test_usage_comes_with_every_chunk_that_is_asked_for_it(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, "/v1/chat/completions", {**CHAT, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


def test_logprobs_of_an_echoed_prompt_are_those_it_had_as_an_answer(server: RunningServer) -> None:
    (answer,) = complete(server, logprobs=1, return_token_ids=True)["choices"]
    whole = answer["prompt_token_ids"] + answer["token_ids"]
    (echo,) = complete(server, prompt=whole, max_tokens=1, echo=True, logprobs=1)["choices"]
    logprobs = echo["logprobs"]
    assert len(logprobs["tokens"]) == len(whole) + 1
    assert logprobs["token_logprobs"][0] is None
    seen = logprobs["token_logprobs"][len(answer["prompt_token_ids"]) : len(whole)]
    assert seen == pytest.approx(answer["logprobs"]["token_logprobs"], abs=1e-3)


def test_logprobs_of_a_prompt_are_vllms(server: RunningServer) -> None:
    response = chat(server, prompt_logprobs=2, return_token_ids=True)
    first, *others = response["prompt_logprobs"]
    assert first is None
    tokens = response["prompt_token_ids"][1:]
    for token, entries in zip(tokens, others, strict=True):
        assert str(token) in entries
        assert {1, 2} <= {entry["rank"] for entry in entries.values()}
        assert sum(math.exp(entry["logprob"]) for entry in entries.values()) < 1.001


def test_tokens_that_are_biased_forbidden_or_end_the_answer(server: RunningServer) -> None:
    letter = server.post("/tokenize", {"prompt": "x", "add_special_tokens": False}).json()["tokens"][0]
    assert complete(server, logit_bias={str(letter): 100})["choices"][0]["text"] == "x" * 6
    (ended,) = complete(server, logit_bias={str(letter): 100}, stop_token_ids=[letter])["choices"]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", letter)
    greedy = complete(server, return_token_ids=True)["choices"][0]["token_ids"]
    banned = complete(server, logit_bias={str(greedy[0]): -100}, return_token_ids=True)["choices"][0]["token_ids"]
    assert greedy[0] not in banned


def test_an_answer_ends_at_the_models_end_but_not_too_early(server: RunningServer) -> None:
    early = {"logit_bias": {str(END): 100}, "ignore_eos": False, "return_token_ids": True}
    (choice,) = complete(server, **early)["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["text"]) == ([END], "stop", "")
    (choice,) = complete(server, **early, min_tokens=3)["choices"]
    assert (choice["token_ids"].index(END), len(choice["token_ids"])) == (3, 4)
    (choice,) = complete(server, **{**early, "ignore_eos": True}, skip_special_tokens=False)["choices"]
    assert choice["text"] == SPECIAL_TOKENS[END] * 6


def test_metrics_count_what_was_served(server: RunningServer) -> None:
    def counts() -> dict[str, float]:
        return server.metrics()

    label = f'{{model_name="{NAMES[0]}"}}'
    before = counts()
    complete(server, prompt=["abc", "defg"], n=2)
    events(server, "/v1/chat/completions", CHAT)
    assert server.post("/v1/completions", {"prompt": ""}).status_code == 400
    wait_until(lambda: counts()["hexllm:requests_in_flight"] == 0)
    after = counts()

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0)

    chat_tokens = len(server.post("/tokenize", {"messages": CHAT["messages"]}).json()["tokens"])
    assert gained(f"hexllm:prompt_tokens_total{label}") == len("abc") + len("defg") + chat_tokens
    assert gained(f"hexllm:generation_tokens_total{label}") == 5 * 6
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_time_per_output_token"):
        assert gained(f"hexllm:{name}_seconds_count{label}") == 5
    assert gained(f"hexllm:inter_token_latency_seconds_count{label}") == 5 * 5
    assert gained(f'hexllm:request_success_total{{finished_reason="length",model_name="{NAMES[0]}"}}') == 5
    assert gained('hexllm:requests_total{outcome="rejected",route="/v1/completions"}') == 1
    assert gained('hexllm:requests_total{outcome="completed",route="/v1/completions"}') == 1
    assert after["hexllm:xla_compiles_after_ready_total"] == 0
    wait_until(lambda: counts()[f"hexllm:kv_cache_usage_perc{label}"] == 0)


def test_metrics_are_those_of_the_page(server: RunningServer) -> None:
    complete(server)
    check_metrics(server)


def test_metrics_count_connections(server: RunningServer) -> None:
    before = server.metrics()["hexllm:open_connections"]  # that of the question itself, at least
    with socket.create_connection(("127.0.0.1", server.port)), socket.create_connection(("127.0.0.1", server.port)):
        wait_until(lambda: server.metrics()["hexllm:open_connections"] == before + 2)
    wait_until(lambda: server.metrics()["hexllm:open_connections"] == before)


def test_the_log_has_a_line_for_a_request_and_nothing_of_its_text(server: RunningServer) -> None:
    id = "a-request-of-the-log"
    headers = {"X-Request-Id": id}
    httpx.post(server.url + "/v1/completions", json={**PROMPT, "prompt": "my secret words"}, headers=headers)
    wait_until(lambda: "prompt=15 " in server.log.read_text())
    (line,) = [each for each in server.log.read_text().splitlines() if "prompt=15 " in each]
    assert "/v1/completions 200 completed" in line
    assert f"label={id} " in line
    assert "output=6 " in line
    assert "secret" not in server.log.read_text()
