"""Vertex AI's part, played over HTTP: it starts a container, asks for its health, and sends what clients send."""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.checkpoints import write_llama
from tests.server.servers import FLAGS, RunningServer, free_port

HEALTH = "/v1/endpoints/123/deployedModels/456"
PREDICT = "/v1/endpoints/123/deployedModels/456:predict"
CONTEXT = 256  # as FLAGS say

GREEDY = {"temperature": 1.0, "top_p": 1.0, "top_k": 1}  # as the notebooks ask for it
CAR = {"prompt": "What is a car?", "max_tokens": 50, **GREEDY}
MESSAGES = [{"role": "user", "content": "What is a car?"}]
CHAT = {"@requestFormat": "chatCompletions", "messages": MESSAGES, "max_tokens": 12, "temperature": 0.0}


class Container(RunningServer):
    """The server as Vertex runs it. `healths` are the answers to the health checks from the start on, `early` is the
    answer to a request that came before it was healthy.
    """

    healths: list[int]
    early: httpx.Response

    def predict(self, *instances: dict, path: str = PREDICT, **rest: Any) -> dict:
        response = self.post(path, {"instances": list(instances), **rest})
        assert response.status_code == 200, response.text
        return response.json()

    def generate(self, **body: Any) -> dict:
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, body: dict, path: str = PREDICT) -> dict:
        response = self.post(path, body)
        assert response.status_code == 400, response.text
        assert response.json().keys() == {"error"}
        return response.json()["error"]

    def chunks(self, body: dict) -> tuple[str, list[bytes]]:
        """The content type of a streamed answer, and each chunk as it was sent."""
        with httpx.stream("POST", self.url + "/generate", json=body, timeout=60) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["transfer-encoding"] == "chunked"
            return response.headers["content-type"], list(response.iter_raw())

    def events(self, body: dict) -> list[dict]:
        """Server-sent events, which must end as they should."""
        kind, chunks = self.chunks(body)
        assert kind == "text/event-stream"
        *events, done, rest = b"".join(chunks).decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture(scope="module")
def vertex(tmp_path_factory) -> Iterator[Container]:
    folder: Path = tmp_path_factory.mktemp("vertex")
    model = write_llama(folder / "model")
    port = free_port()
    environment = {
        "AIP_HTTP_PORT": str(port),
        "AIP_HEALTH_ROUTE": HEALTH,
        "AIP_PREDICT_ROUTE": PREDICT,
        "AIP_STORAGE_URI": str(model),
        "AIP_MODE": "PREDICTION",
        "HEX_LLM_LOG_LEVEL": "info",
        "MODEL_ID": "google/some-model",
        "DEPLOY_SOURCE": "notebook",
    }
    flags = [*FLAGS, "--data_parallel_size=1", "--tensor_parallel_size=1", "--num_hosts=1", "--enable_docs"]
    command = [sys.executable, "-m", "hex_llm.server.api_server", *flags]
    log = folder / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | environment)
    container = Container(process, port, log, None)
    try:
        _poll(container)
        yield container
    finally:
        process.terminate()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _poll(container: Container) -> None:
    container.healths = []
    deadline = time.monotonic() + 120
    while 200 not in container.healths:
        assert container.process.poll() is None, container.log.read_text()
        assert time.monotonic() < deadline, container.log.read_text()
        try:
            container.healths.append(container.get(HEALTH).status_code)
        except httpx.ConnectError:  # before it listens
            assert not container.healths
        if container.healths == [503]:
            container.early = container.post(PREDICT, {"instances": [CAR]})
        time.sleep(0.05)


def test_health_is_503_from_the_first_answer_until_it_is_200(vertex):
    assert len(vertex.healths) > 1
    assert set(vertex.healths[:-1]) == {503}
    assert vertex.healths[-1] == 200
    assert vertex.early.status_code == 503
    assert vertex.early.json()["error"]["code"] == "starting"
    assert all(vertex.get(path).status_code == 200 for path in (HEALTH, "/ping", "/health", "/live"))


def test_the_instance_of_the_notebooks_has_one_prediction(vertex):
    answer = vertex.predict(CAR)
    assert answer.keys() == {"predictions"}
    (text,) = answer["predictions"]
    completion = vertex.post("/v1/completions", {"prompt": CAR["prompt"], "max_tokens": 50, "temperature": 0}).json()
    assert text == completion["choices"][0]["text"] != ""
    assert vertex.predict(CAR, path="/generate") == answer


@pytest.mark.parametrize(
    "instance",
    [
        {"prompt": "What is a car?", "max_tokens": 1},
        {"prompt": "What is a car?", "max_tokens": 50.0, "temperature": 1.0, "top_p": 1.0, "top_k": 1.0},
        {"prompt": "My name is", "max_tokens": 100, "temperature": 1.0, "top_p": 1.0, "top_k": 10},
        {"prompt": "My name is", "max_tokens": 10, "temperature": 0.0, "top_k": 1, "raw_response": True},
        {"prompt": "My name is", "max_tokens": 10, "dynamic-lora": ""},
    ],
)
def test_other_instances_of_the_notebooks_are_answered(vertex, instance):
    (text,) = vertex.predict(instance)["predictions"]
    assert isinstance(text, str)


def test_a_number_is_the_same_as_a_double(vertex):
    doubles = {name: float(value) if isinstance(value, int) else value for name, value in CAR.items()}
    assert vertex.predict(doubles) == vertex.predict(CAR)


def test_every_instance_is_answered_as_if_it_were_alone(vertex):
    instances = [{"prompt": f"Number {number}", "max_tokens": number + 3} for number in range(20)]
    alone = [vertex.predict(each, parameters=GREEDY)["predictions"][0] for each in instances]
    assert len(set(alone)) > 10
    assert vertex.predict(*instances, parameters=GREEDY)["predictions"] == alone


def test_a_body_without_instances_is_answered_likewise(vertex):
    assert vertex.generate(**CAR) == vertex.predict(CAR)


def test_max_tokens_is_as_in_hex_llm(vertex):
    def count(**members: Any) -> int:
        (number,) = vertex.generate(prompt="ab", ignore_eos=True, raw_response=True, **members)["output_token_counts"]
        return number

    assert count(max_tokens=1) == 1
    assert count(max_tokens=0) == CONTEXT - 2
    assert count() == 16


def test_a_raw_response_tells_counts_and_log_probabilities(vertex):
    prompts = ["What is a car?", "What is a bus?"]
    answer = vertex.predict(*({**CAR, "prompt": prompt, "raw_response": True} for prompt in prompts))
    assert answer.keys() == {"predictions", "output_token_counts", "cumulative_logprobs"}
    asked = {"prompt": prompts, "max_tokens": 50, "temperature": 0, "logprobs": 0}
    choices = vertex.post("/v1/completions", asked).json()["choices"]
    assert answer["predictions"] == [choice["text"] for choice in choices]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    assert answer["cumulative_logprobs"] == pytest.approx(sums, abs=1e-3)
    assert answer["output_token_counts"] == [len(choice["logprobs"]["token_logprobs"]) for choice in choices]


def test_a_prompt_may_be_tokens(vertex):
    tokens = vertex.post("/tokenize", {"prompt": CAR["prompt"]}).json()["tokens"]
    assert vertex.predict({**CAR, "prompt": tokens}) == vertex.predict(CAR)
    assert vertex.predict({**CAR, "prompt": [float(token) for token in tokens]}) == vertex.predict(CAR)


def test_a_stop_string_ends_a_prediction(vertex):
    (text,) = vertex.predict(CAR)["predictions"]
    stop = text[5:7]
    (cut,) = vertex.predict({**CAR, "stop": [stop]})["predictions"]
    assert cut == text[: text.index(stop)]


def test_the_pieces_of_a_stream_end_with_nul(vertex):
    (text,) = vertex.predict(CAR)["predictions"]
    for body in ({"instances": [CAR], "parameters": {"stream": True}}, {**CAR, "stream": True}):
        _, chunks = vertex.chunks(body)
        *frames, rest = b"".join(chunks).split(b"\0")
        assert rest == b""
        pieces = [json.loads(frame) for frame in frames]
        assert all(piece.keys() == {"predictions"} and len(piece["predictions"]) == 1 for piece in pieces)
        assert len(pieces) > 10
        assert "".join(piece["predictions"][0] for piece in pieces) == text


def test_several_instances_share_a_stream(vertex):
    instances = [{**CAR, "prompt": f"Number {number}", "max_tokens": 4 * number + 1} for number in range(4)]
    whole = vertex.predict(*instances, parameters={"raw_response": True})
    body = {"instances": instances, "parameters": {"raw_response": True, "stream": True}}
    *frames, _ = b"".join(vertex.chunks(body)[1]).split(b"\0")
    pieces = [json.loads(frame) for frame in frames]
    assert all(len(piece["predictions"]) == len(piece["output_token_counts"]) == 4 for piece in pieces)
    texts = ["".join(column) for column in zip(*(piece["predictions"] for piece in pieces), strict=True)]
    counts = [sum(column) for column in zip(*(piece["output_token_counts"] for piece in pieces), strict=True)]
    assert texts == whole["predictions"]
    assert counts == whole["output_token_counts"]
    assert pieces[-1]["cumulative_logprobs"] == pytest.approx(whole["cumulative_logprobs"], abs=1e-3)


@pytest.mark.parametrize("every", [1, 7, 7.0, 2048])
def test_every_chunk_of_streaming_tokens_is_json_of_so_many_tokens(vertex, every):
    body = {**CAR, "ignore_eos": True, "max_tokens": 40}
    (text,) = vertex.generate(**body)["predictions"]
    kind, chunks = vertex.chunks({**body, "raw_response": True, "streaming_tokens": every})
    assert kind == "application/json"
    pieces = [json.loads(chunk) for chunk in chunks]
    assert "".join(piece["predictions"][0] for piece in pieces) == text
    counts = [piece["output_token_counts"][0] for piece in pieces]
    assert sum(counts) == 40
    # A client that is slow to read, as one on a busy machine may be, finds more in a chunk.
    assert all(count >= every for count in counts[:-1])
    assert len(counts) <= math.ceil(40 / every)
    sums = [piece["cumulative_logprobs"][0] for piece in pieces]
    assert all(later < earlier for earlier, later in itertools.pairwise(sums))


def test_a_chat_at_the_top_is_answered_as_on_v1(vertex):
    expected = vertex.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}).json()
    assert expected["object"] == "chat.completion"
    for extra in ({}, {"model": ""}, {"model": "hexllm"}, {"max_tokens": 12.0}, {"google": {"x": 1}}):
        answer = vertex.generate(**CHAT | extra)
        for member in ("choices", "usage", "object", "model"):
            assert answer[member] == expected[member]
    assert vertex.generate(**CHAT)["usage"].keys() >= {"prompt_tokens", "completion_tokens", "prompt_tokens_details"}


def test_a_chat_in_an_instance_is_the_prediction_itself(vertex):
    expected = vertex.generate(**CHAT)
    answer = vertex.predict(CHAT)
    assert answer.keys() == {"predictions"}
    assert answer["predictions"]["choices"] == expected["choices"]
    assert answer["predictions"]["choices"][0]["message"]["content"]


def test_several_chats_are_a_list_of_predictions(vertex):
    other = [{"role": "user", "content": [{"type": "text", "text": "What is a bus?"}]}]
    answer = vertex.predict(CHAT, {**CHAT, "messages": other, "n": 2}, {**CHAT, "max_tokens": 3.0})
    first, second, third = answer["predictions"]
    assert first["choices"] == vertex.generate(**CHAT)["choices"]
    assert len(second["choices"]) == 2
    assert second["choices"] == vertex.generate(**CHAT | {"messages": other, "n": 2})["choices"]
    assert third["usage"]["completion_tokens"] <= 3
    assert len({each["id"] for each in answer["predictions"]}) == 3


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_streamed_chat_is_what_the_notebooks_read(vertex, wrapped):
    expected = vertex.generate(**CHAT)
    asked = {**CHAT, "stream": True}
    events = vertex.events({"instances": [asked]} if wrapped else asked)
    # One client takes every chunk to have a choice; another one, usage to come alone and with the last.
    assert all(event["choices"][0]["delta"] is not None for event in events)
    assert events[0]["choices"][0]["delta"]["content"] == ""
    assert [event.get("usage") for event in events] == [None] * (len(events) - 1) + [expected["usage"]]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert text == expected["choices"][0]["message"]["content"]


def test_the_openai_client_reads_a_chat_through_the_predict_route(vertex):
    client = openai.OpenAI(base_url=vertex.url, api_key="token", max_retries=0)
    expected = vertex.generate(**CHAT)
    body = {"model": "", **CHAT}
    answer = client.post("/generate", body=body, cast_to=openai.types.chat.ChatCompletion)
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"]
    stream = client.post(
        "/generate",
        body={**body, "stream": True},
        cast_to=openai.types.chat.ChatCompletion,
        stream=True,
        stream_cls=openai.Stream[openai.types.chat.ChatCompletionChunk],
    )
    text, usage = "", None
    for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
            continue
        text += chunk.choices[0].delta.content or ""
    assert text == expected["choices"][0]["message"]["content"]
    assert usage is not None
    assert usage.completion_tokens == expected["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"instances": [CAR, {**CAR, "top_k": 1.5}]}, "instances[1].top_k"),
        ({"instances": [CAR, {**CAR, "prompt": [1, 320]}]}, "instances[1].prompt"),
        ({"instances": [CAR, {**CAR, "prompt": "a" * 300}]}, "instances[1].prompt"),
        ({"instances": [{**CAR, "prompt": "a" * 240, "stream": True}]}, "instances[0].max_tokens"),
        ({"instances": [CAR], "parameters": {"stop_token_ids": [999]}}, "parameters.stop_token_ids"),
        ({"instances": [{**CAR, "dynamic-lora": "gs://bucket/adapter"}]}, "instances[0].dynamic-lora"),
        ({"instances": [{**CHAT, "stream": True, "messages": []}]}, "instances[0].messages"),
        ({"messages": MESSAGES}, "messages"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_a_refusal_names_the_place(vertex, body, param):
    error = vertex.refusal(body)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_a_prompt_beyond_the_context_is_told_apart(vertex):
    assert vertex.refusal({**CAR, "prompt": "a" * 300})["code"] == "context_length_exceeded"
    assert vertex.refusal({**CAR, "prompt": "a" * 100_000})["code"] == "context_length_exceeded"


def test_the_predict_route_takes_posts_only(vertex):
    assert vertex.get(PREDICT).status_code == 405
    assert vertex.post(HEALTH, {}).status_code == 405


def test_tokens_go_there_and_back(vertex):
    answer = vertex.post("/tokenize", {"prompt": "hé!", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 4
    assert answer["max_model_len"] == CONTEXT
    assert vertex.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "hé!"}
    assert vertex.post("/tokenize", {"prompt": "a"}).json()["token_strs"] is None


def test_a_conversation_is_tokenized_as_the_template_writes_it(vertex):
    tokens = vertex.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    text = vertex.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == "<s>[user]What is a car?\n[assistant]"
    closed = vertex.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()["tokens"]
    assert vertex.post("/detokenize", {"tokens": closed}).json()["prompt"] == "<s>[user]What is a car?\n"
    assert vertex.generate(**CHAT)["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "add_special_token": True}, "add_special_token"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.0]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * (CONTEXT + 1)}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(vertex, path, body, param):
    assert vertex.refusal(body, path)["param"] == param


def test_models_are_listed_and_shown_by_name(vertex):
    listed = vertex.get("/v1/models").json()
    (model,) = listed["data"]
    assert (listed["object"], model["object"], model["max_model_len"]) == ("list", "model", CONTEXT)
    assert vertex.get(f"/v1/models/{model['id']}").json() == model
    assert openai.OpenAI(base_url=f"{vertex.url}/v1", api_key="x").models.list().data[0].id == model["id"]
    for path in ("/v1/models/nothing", "/v1/models/"):
        assert vertex.get(path).status_code == 404
    assert vertex.get("/v1/models/nothing").json()["error"]["code"] == "model_not_found"
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert vertex.post(path, {**body, "model": "nothing"}).status_code == 404
        assert vertex.post(path, {**body, "model": model["id"]}).status_code == 200


def test_the_docs_are_one_page_that_needs_nothing_else(vertex):
    page = vertex.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "streaming_tokens" in page.text
    assert "http://" not in page.text
    assert "<script" not in page.text
    described = vertex.get("/openapi.json").json()
    schema = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["messages"]
