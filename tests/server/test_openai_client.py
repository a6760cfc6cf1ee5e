"""OpenAI's own Python package, unmodified, against a server of the embedded model."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.servers import RunningServer, running_server
from tests.server.serving import wait_until

MODEL = "hex-mini"
KEY = "a-key-of-the-tests"
PADDING = 64  # prefill_len_padding of the tests' servers, the unit of prefix hits
QUESTION = "What is 45 + 37?"
ANSWER = "45 + 37 = 82."
NUM_PROMPT, NUM_ANSWER = 14, 12  # tokens: the one with the template's, the other with its end token


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(None, log, "--enable_prefix_cache_hbm", keys=[KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as opened:
        yield opened


def asked(content: Any = QUESTION, **others: Any) -> dict[str, Any]:
    """Arguments of a chat that has one answer only."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, **others}


def told(chunks: Any) -> list[str]:
    """The texts of a stream's choices, put together."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if chunk.object == "text_completion" else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
    return [texts[index] for index in sorted(texts)]


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "hex-llm")
    assert client.models.retrieve(MODEL) == model


def test_a_chat_is_answered_and_counted(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(**asked())
    assert (response.object, response.model) == ("chat.completion", MODEL)
    assert response.id.startswith("chatcmpl-")
    (choice,) = response.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", ANSWER, None)
    usage = response.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (NUM_PROMPT, NUM_ANSWER)
    assert usage.total_tokens == NUM_PROMPT + NUM_ANSWER


def test_a_conversation_has_system_and_assistant_turns(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I help you?"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    response = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert "Paris" in (response.choices[0].message.content or "")
    # A turn that came back from the client, with all that it has there, may be sent again.
    messages += [response.choices[0].message, {"role": "user", "content": QUESTION}]
    again = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert again.choices[0].message.content


def test_texts_in_parts_are_lines_of_one_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "45 + 37?"}]
    in_parts = client.chat.completions.create(**asked(parts))
    in_lines = client.chat.completions.create(**asked("What is\n45 + 37?"))
    assert in_parts.choices[0].message.content == in_lines.choices[0].message.content
    assert in_parts.usage == in_lines.usage
    (one,) = client.chat.completions.create(**asked([{"type": "text", "text": QUESTION}])).choices
    assert one.message.content == ANSWER


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    with client.chat.completions.create(**asked(), stream=True) as stream:
        chunks = list(stream)
    assert told(chunks) == [ANSWER]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    # Without stream_options the last chunk has usage, and a choice.
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NUM_ANSWER


def test_usage_that_is_asked_for_comes_in_a_chunk_of_its_own(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**asked(), stream=True, stream_options={"include_usage": True}))
    assert told(chunks) == [ANSWER]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (NUM_PROMPT, NUM_ANSWER)
    # OpenAI's chunks say null, so that clients that read the member find it.
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
    assert all(len(chunk.choices) == 1 for chunk in chunks[:-1])


def test_usage_that_is_declined_does_not_come(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**asked(), stream=True, stream_options={"include_usage": False}))
    assert told(chunks) == [ANSWER]
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


def test_the_packages_own_stream_helper_puts_an_answer_together(client: openai.OpenAI) -> None:
    arguments = asked(logprobs=True, n=2)
    with client.chat.completions.stream(**arguments, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_completion()
    assert kinds.count("content.done") == 2
    assert kinds.count("logprobs.content.done") == 2
    assert [choice.message.content for choice in whole.choices] == [ANSWER, ANSWER]
    assert whole.usage is not None
    # A prompt counts once, however many answers it has.
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (NUM_PROMPT, 2 * NUM_ANSWER)


def test_prompts_are_texts_and_tokens_one_and_several(client: openai.OpenAI) -> None:
    first = client.completions.create(model=MODEL, prompt="One two", max_tokens=5, temperature=0)
    assert (first.object, first.choices[0].finish_reason) == ("text_completion", "length")
    assert first.id.startswith("cmpl-")
    ids = client.post("/../tokenize", body={"prompt": "One two"}, cast_to=dict[str, Any])["tokens"]
    for prompt, times in (([ids], 1), (ids, 1), (["One two"] * 2, 2), ([ids, ids, ids], 3)):
        response = client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, temperature=0)
        assert [(choice.index, choice.text) for choice in response.choices] == [
            (index, first.choices[0].text) for index in range(times)
        ]
        assert response.usage is not None
        assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (times * len(ids), times * 5)


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "prompt": ["One two", "Hello"], "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(**arguments, stream=True))
    assert told(chunks) == [choice.text for choice in whole.choices]
    assert chunks[-1].usage == whole.usage
    options: Any = {"include_usage": True}
    chunks = list(client.completions.create(**arguments, stream=True, stream_options=options))
    assert told(chunks) == [choice.text for choice in whole.choices]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


def test_a_prompt_is_echoed_whole_and_streamed(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "prompt": "One two", "max_tokens": 4, "temperature": 0}
    text = client.completions.create(**arguments).choices[0].text
    assert client.completions.create(**arguments, echo=True).choices[0].text == "One two" + text
    assert told(client.completions.create(**arguments, echo=True, stream=True)) == ["One two" + text]


def test_logprobs_of_a_chat_belong_to_its_tokens(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**asked(logprobs=True, top_logprobs=3)).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert len(content) == NUM_ANSWER
    assert bytes(byte for entry in content[:-1] for byte in entry.bytes or ()).decode() == ANSWER
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)  # greedy
        ranked = [top.logprob for top in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)
        assert sum(map(math.exp, ranked)) < 1.001
    streamed = []
    for chunk in client.chat.completions.create(**asked(logprobs=True, top_logprobs=3), stream=True):
        logprobs = chunk.choices[0].logprobs
        streamed += (logprobs.content or []) if logprobs else []
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in content], abs=1e-3)


def test_logprobs_of_a_completion_belong_to_its_tokens(client: openai.OpenAI) -> None:
    response = client.completions.create(model=MODEL, prompt="One two", max_tokens=6, logprobs=2, temperature=0)
    choice = response.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    tokens, places = logprobs.tokens, logprobs.text_offset
    assert tokens is not None
    assert "".join(tokens) == choice.text
    assert places == [len("".join(tokens[:index])) for index in range(6)]
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    for token, logprob, top in zip(tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())


def test_n_answers_are_drawn_apart_and_a_seed_draws_them_again(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str]:
        arguments: Any = {"model": MODEL, "prompt": "One two", "max_tokens": 8, "temperature": 2, "n": 4, "seed": seed}
        response = client.completions.create(**arguments)
        assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
        assert told(client.completions.create(**arguments, stream=True)) == [each.text for each in response.choices]
        return [choice.text for choice in response.choices]

    texts = draw(7)
    assert len(set(texts)) > 1
    assert draw(7) == texts
    assert draw(8) != texts


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    for stop in ("37", ["xyz", "37"]):
        choice = client.chat.completions.create(**asked(stop=stop)).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("45 + ", "stop")
        chunks = list(client.chat.completions.create(**asked(stop=stop), stream=True))
        assert told(chunks) == ["45 + "]
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_has_at_most_the_tokens_it_may(client: openai.OpenAI, name: str) -> None:
    response = client.chat.completions.create(**asked(**{name: 2}))
    assert (response.choices[0].message.content, response.choices[0].finish_reason) == ("45", "length")
    assert response.usage is not None
    assert response.usage.completion_tokens == 2


def test_fields_that_only_vllm_has_come_by_extra_body(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True, "top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False}
    response = client.chat.completions.create(**asked(max_tokens=20, extra_body=extra))
    assert response.usage is not None
    assert response.usage.completion_tokens == 20
    assert (response.choices[0].message.content or "").startswith(ANSWER + "<|end|>")


def test_a_long_prompt_that_comes_again_is_found_in_the_cache(client: openai.OpenAI) -> None:
    prompt = [50 + index for index in range(150)]
    found = []
    for _ in range(2):
        usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, temperature=0).usage
        assert usage is not None
        assert usage.prompt_tokens == 150
        assert usage.prompt_tokens_details is not None
        found.append(usage.prompt_tokens_details.cached_tokens)
    assert found == [0, 150 // PADDING * PADDING]
    last = list(client.completions.create(model=MODEL, prompt=prompt, max_tokens=2, stream=True))[-1].usage
    assert last is not None
    assert last.prompt_tokens_details is not None
    assert last.prompt_tokens_details.cached_tokens == found[1]


def test_a_raw_answer_shows_the_requests_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**asked(max_tokens=1))
    assert raw.headers["x-request-id"].startswith("req-")
    response = raw.parse()
    assert response._request_id == raw.headers["x-request-id"]
    named = client.chat.completions.create(**asked(max_tokens=1), extra_headers={"X-Request-Id": "mine-1"})
    assert named._request_id == "mine-1"
    with client.chat.completions.with_streaming_response.create(**asked(max_tokens=1), stream=True) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["x-request-id"].startswith("req-")
        assert list(streamed.iter_lines())[-2:] == ["data: [DONE]", ""]


def test_the_async_client_has_many_answers_at_a_time(server: RunningServer) -> None:
    async def ask() -> tuple[list[Any], list[list[str]]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:

            async def stream() -> list[str]:
                return told([chunk async for chunk in await client.chat.completions.create(**asked(), stream=True)])

            assert [model.id async for model in client.models.list()] == [MODEL]
            whole = asyncio.gather(*[client.chat.completions.create(**asked()) for _ in range(12)])
            streamed = asyncio.gather(*[stream() for _ in range(12)])
            return await whole, await streamed

    whole, streamed = asyncio.run(ask())
    assert [response.choices[0].message.content for response in whole] == [ANSWER] * 12
    assert streamed == [[ANSWER]] * 12


def test_a_client_that_leaves_a_stream_leaves_nothing_behind(server: RunningServer, client: openai.OpenAI) -> None:
    arguments = asked(max_tokens=200, extra_body={"ignore_eos": True})
    with client.chat.completions.create(**arguments, stream=True) as stream:
        next(iter(stream))
    assert client.chat.completions.create(**asked()).choices[0].message.content == ANSWER
    wait_until(lambda: server.metrics()["hexllm:admitted_sequences"] == 0)
