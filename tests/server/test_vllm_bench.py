"""`vllm bench serve` against our server: what it sends, sent again as it does, and the client itself where it is.

It reads a completion's or a chat's stream like this: what has choices is a token, whose text may be empty; what has
none has the usage; what begins with a colon is passed over; and a request that gave no choice has failed.
"""

import asyncio
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

import hex_llm
from tests.server.servers import RunningServer, running_server

MODEL = "meta-llama/Llama-3.3-70B-Instruct"
FOLDER = Path(hex_llm.__file__).parent / "assets" / "hex-mini"
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN, CONCURRENCY = 50, 32, 16, 8
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(None, log, f"--served_model_name={MODEL}") as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[str]:
    """As its random dataset: texts of tokens drawn at random, which as texts may be tokens more or fewer."""
    draw = random.Random(100)
    return [tokenizer.decode([draw.randrange(300, 2048) for _ in range(INPUT_LEN)]) for _ in range(NUM_PROMPTS)]


def completion_body(prompt: str | list[int], **others: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "repetition_penalty": 1.0,
        "max_tokens": OUTPUT_LEN,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **others,
    }


def chat_body(prompt: str, **others: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}],
        "max_completion_tokens": OUTPUT_LEN,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **others,
    }


@dataclass(frozen=True)
class Read:
    """What the client has of a stream."""

    chunks: list[dict[str, Any]]  # that have choices
    usage: dict[str, Any]
    request_id: str


async def send(client: httpx.AsyncClient, path: str, body: dict[str, Any], number: int = 0) -> Read:
    headers = {
        "Accept": "*/*",
        "Accept-Encoding": "gzip, deflate",
        "User-Agent": "Python/3.12 aiohttp/3.13.2",
        "x-request-id": f"bench-0a1b2c3d-{number}",
    }
    response = await client.post(path, json=body, headers=headers)
    assert (response.status_code, response.reason_phrase) == (200, "OK"), response.text
    events = [event for event in response.text.split("\n\n") if event and not event.startswith(":")]
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    told = [chunk for chunk in chunks if chunk["choices"]]
    (usage,) = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
    return Read(told, usage, response.headers["x-request-id"])


def run(server: RunningServer, path: str, bodies: list[dict[str, Any]]) -> list[Read]:
    """Sends all of them, so many at a time."""

    async def main() -> list[Read]:
        limit = asyncio.Semaphore(CONCURRENCY)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def one(number: int, body: dict[str, Any]) -> Read:
                async with limit:
                    return await send(client, path, body, number)

            return await asyncio.gather(*(one(number, body) for number, body in enumerate(bodies)))

    return asyncio.run(main())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}])
def test_completions_have_exactly_the_tokens_asked_for(
    server: RunningServer, tokenizer: Tokenizer, prompts: list[str], sampling: dict[str, Any]
) -> None:
    answers = run(server, COMPLETIONS, [completion_body(prompt, **sampling) for prompt in prompts])
    assert [each.usage["prompt_tokens"] for each in answers] == [len(tokenizer.encode(each)) for each in prompts]
    assert [each.usage["completion_tokens"] for each in answers] == [OUTPUT_LEN] * NUM_PROMPTS
    assert [each.request_id for each in answers] == [f"bench-0a1b2c3d-{number}" for number in range(NUM_PROMPTS)]
    for each in answers:
        assert 2 <= len(each.chunks) <= OUTPUT_LEN + 1  # the last says why it ended
        assert all(isinstance(chunk["choices"][0]["text"], str) for chunk in each.chunks)
        assert each.chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_chats_have_exactly_the_tokens_asked_for(
    server: RunningServer, tokenizer: Tokenizer, prompts: list[str]
) -> None:
    answers = run(server, CHAT, [chat_body(prompt) for prompt in prompts])
    written = [f"<|user|>{prompt.strip()}<|end|><|assistant|>" for prompt in prompts]
    assert [each.usage["prompt_tokens"] for each in answers] == [len(tokenizer.encode(each)) for each in written]
    assert [each.usage["completion_tokens"] for each in answers] == [OUTPUT_LEN] * NUM_PROMPTS
    for each in answers:
        # The first says who speaks.
        assert 3 <= len(each.chunks) <= OUTPUT_LEN + 2
        assert all("delta" in chunk["choices"][0] for chunk in each.chunks)


def test_logprobs_come_for_every_token(server: RunningServer, prompts: list[str]) -> None:
    for each in run(server, COMPLETIONS, [completion_body(prompt, logprobs=3) for prompt in prompts[:8]]):
        told = [chunk["choices"][0]["logprobs"] for chunk in each.chunks]
        assert sum(len(logprobs["tokens"]) for logprobs in told if logprobs) == OUTPUT_LEN


def test_the_warm_up_and_the_probes_are_answered(server: RunningServer, prompts: list[str]) -> None:
    (answer,) = run(server, COMPLETIONS, [completion_body(prompts[0])])
    assert answer.usage["completion_tokens"] == OUTPUT_LEN
    (probe,) = run(server, COMPLETIONS, [completion_body("Hi", max_tokens=1)])
    assert probe.usage["completion_tokens"] == 1
    assert probe.chunks
    (probe,) = run(server, CHAT, [chat_body("Hi", max_completion_tokens=1)])
    assert probe.usage["completion_tokens"] == 1
    assert probe.chunks


def test_prompts_that_are_tokens_need_no_tokenizer(server: RunningServer) -> None:
    draw = random.Random(1)
    bodies = [completion_body([draw.randrange(300, 2048) for _ in range(INPUT_LEN)]) for _ in range(8)]
    for each in run(server, COMPLETIONS, bodies):
        assert (each.usage["prompt_tokens"], each.usage["completion_tokens"]) == (INPUT_LEN, OUTPUT_LEN)


def test_the_model_is_found_and_the_tokenizers_are_compared(server: RunningServer, prompts: list[str]) -> None:
    model = server.get("/v1/models").json()["data"][0]
    assert model["id"] == MODEL
    assert isinstance(model["root"], str)
    tokens = server.post("/tokenize", {"model": MODEL, "prompt": prompts[0], "add_special_tokens": False}).json()
    back = server.post("/detokenize", {"model": MODEL, "tokens": tokens["tokens"]}).json()
    assert back["prompt"] == prompts[0]


def test_what_it_asks_only_a_vllm_for_is_not_there_and_does_no_harm(server: RunningServer) -> None:
    assert httpx.post(server.url + "/start_profile", json=completion_body("Hi")).status_code == 404
    metrics = server.get("/metrics")
    assert metrics.status_code == 200
    assert "vllm:" not in metrics.text


@pytest.mark.skipif(shutil.which("vllm") is None, reason="there is no vllm on this machine")
@pytest.mark.parametrize(("backend", "endpoint"), [("vllm", COMPLETIONS), ("openai-chat", CHAT)])
def test_the_client_itself_counts_what_was_asked_for(server: RunningServer, backend: str, endpoint: str) -> None:
    command = f"""vllm bench serve --backend {backend} --endpoint {endpoint} --host 127.0.0.1 --port {server.port}
        --model {MODEL} --tokenizer {FOLDER} --dataset-name random --ignore-eos --num-prompts {NUM_PROMPTS}
        --random-input-len={INPUT_LEN} --random-output-len={OUTPUT_LEN} --max-concurrency={CONCURRENCY} --seed 100"""
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=300, check=True)
    table = dict(re.findall(r"^(.+?) *: +([\d.]+) *$", done.stdout, re.MULTILINE))
    assert (table["Successful requests"], table["Failed requests"]) == (str(NUM_PROMPTS), "0")
    assert int(table["Total generated tokens"]) == NUM_PROMPTS * OUTPUT_LEN
