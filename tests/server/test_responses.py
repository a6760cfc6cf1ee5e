"""Responses and streams: OpenAI's shapes, checked by OpenAI's own types, and vLLM's additions."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hex_llm.completion import Answer
from hex_llm.config import Config
from hex_llm.engine.output import Output
from hex_llm.engine.request import FinishReason, Request, TokenLogprobs
from hex_llm.errors import EngineDead
from hex_llm.server.chat_response import chat_response, chat_stream
from hex_llm.server.chat_schema import ChatRequest, read_chat
from hex_llm.server.completion_response import completion_response, completion_stream
from hex_llm.server.completion_schema import CompletionRequest, read_completion
from hex_llm.server.logprobs import TextOffsets
from hex_llm.server.sse import Stream
from hex_llm.server.usage import usage_of
from hex_llm.text.tokenizer import Tokenizer
from tests.text import built_tokenizers

CONFIG = Config(enable_prompt_logprobs=True)
TOKENIZER = built_tokenizers.byte_level()
(END,) = TOKENIZER.eos_ids
HEAD: dict[str, Any] = {"id": "chatcmpl-1", "created": 1700000000, "model": "mini"}
PROMPT = TOKENIZER.encode("Once upon")


def chat(**fields: Any) -> ChatRequest:
    return read_chat({"messages": [{"role": "user", "content": "Hi"}], **fields}, CONFIG, {})


def completion(prompt: Any = "Once upon", **fields: Any) -> CompletionRequest:
    return read_completion({"prompt": prompt, **fields}, CONFIG, {})


def answers_to(request: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]] = (PROMPT,)) -> list[Answer]:
    return [
        Answer.of(
            TOKENIZER,
            Request(id="0", prompt=list(prompt), sampling=request.sampling, max_output=100, stop_ids=frozenset({END})),
            index,
        )
        for prompt in prompts
        for index in range(request.sampling.n)
    ]


def give(answer: Answer, text: str, *, end: FinishReason | None = None, num_cached: int = 0) -> list[int]:
    """Has the engine bring the tokens of a text in one step, and with STOP an end token."""
    tokens = TOKENIZER.encode(text) + ([END] if end == FinishReason.STOP else [])
    sampling = answer.request.sampling
    prompt = answer.request.prompt
    answer.take(
        Output(
            "0",
            tuple(tokens),
            logprobs=tuple(entry(token, sampling.logprobs) for token in tokens)
            if sampling.logprobs is not None
            else None,
            finish_reason=end,
            num_cached=num_cached,
            prompt_logprobs=(None, *(entry(token, sampling.prompt_logprobs) for token in prompt[1:]))
            if sampling.prompt_logprobs is not None
            else None,
        )
    )
    return tokens


def entry(token: int, num_alternatives: int | None) -> TokenLogprobs:
    """The token was the second choice, after token 5."""
    return TokenLogprobs(-1.5, 2, ((5, -0.5), (token, -1.5), (6, float("-inf")))[: num_alternatives or 0])


def events(data: bytes) -> list[dict[str, Any]]:
    *lines, rest = data.decode().split("\n\n")
    assert rest == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def play(stream: Stream, answers: Sequence[Answer], texts: Sequence[str], *, end: FinishReason) -> bytes:
    """Streams the same texts for every answer, step by step."""
    data = stream.first()
    for step, text in enumerate(texts):
        for position, answer in enumerate(answers):
            give(answer, text, end=end if step == len(texts) - 1 else None)
            data += stream.more(position, answer)
    return data + stream.last()


def test_a_chat_response_is_one_of_openai():
    request = chat()
    (answer,) = answers = answers_to(request)
    tokens = give(answer, "hello world", end=FinishReason.STOP, num_cached=1)
    response = chat_response(request, answers, TOKENIZER, **HEAD)
    assert response == {
        **HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": len(tokens),
            "total_tokens": len(PROMPT) + len(tokens),
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    parsed = ChatCompletion.model_validate(response)
    assert parsed.choices[0].message.content == "hello world"
    assert parsed.usage.prompt_tokens_details.cached_tokens == 1


def test_what_ended_an_answer_is_told():
    request = chat(stop="world", stop_token_ids=[TOKENIZER.encode("!")[0]], n=2)
    first, second = answers = answers_to(request)
    give(first, "hello world")
    give(second, "hello!", end=FinishReason.LENGTH)
    choices = chat_response(request, answers, TOKENIZER, **HEAD)["choices"]
    assert [each["index"] for each in choices] == [0, 1]
    assert [each["message"]["content"] for each in choices] == ["hello ", "hello!"]
    assert [each["finish_reason"] for each in choices] == ["stop", "length"]
    assert [each["stop_reason"] for each in choices] == ["world", None]


def test_an_answer_that_failed_is_never_given_as_one():
    request = chat()
    (answer,) = answers = answers_to(request)
    give(answer, "hello", end=FinishReason.ERROR)
    with pytest.raises(AssertionError):
        chat_response(request, answers, TOKENIZER, **HEAD)
    with pytest.raises(AssertionError):
        chat_stream(request, answers, TOKENIZER, **HEAD).more(0, answer)


def test_chat_logprobs_have_tokens_bytes_and_alternatives():
    request = chat(logprobs=True, top_logprobs=3)
    (answer,) = answers = answers_to(request)
    tokens = give(answer, "hello 🚀", end=FinishReason.LENGTH)
    response = chat_response(request, answers, TOKENIZER, **HEAD)
    content = ChatCompletion.model_validate(response).choices[0].logprobs.content
    assert len(content) == len(tokens)
    assert b"".join(bytes(each.bytes) for each in content) == "hello 🚀".encode()
    assert "".join(each.token for each in content if "\\x" not in each.token).startswith("hello")
    assert [each.logprob for each in content[0].top_logprobs] == [-0.5, -1.5, -9999.0]
    assert content[0].top_logprobs[1].token == content[0].token
    assert response["choices"][0]["logprobs"]["refusal"] is None


def test_a_token_that_is_no_whole_character_is_named_by_its_bytes():
    (token,) = [id for id in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(id) == b"\xf0"]
    request = chat(logprobs=True)
    (answer,) = answers = answers_to(request)
    answer.take(Output("0", (token,), (entry(token, 0),), FinishReason.LENGTH))
    (named,) = chat_response(request, answers, TOKENIZER, **HEAD)["choices"][0]["logprobs"]["content"]
    assert named == {"token": "\\xf0", "logprob": -1.5, "bytes": [0xF0], "top_logprobs": []}
    request = completion(logprobs=0)
    (answer,) = answers = answers_to(request)
    answer.take(Output("0", (token,), (entry(token, 0),), FinishReason.LENGTH))
    logprobs = completion_response(request, answers, TOKENIZER, **HEAD)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xf0"]
    assert logprobs["top_logprobs"] == [{"bytes:\\xf0": -1.5}]


def test_tokens_are_named_by_id_where_asked():
    request = chat(logprobs=True, return_tokens_as_token_ids=True)
    (answer,) = answers = answers_to(request)
    tokens = give(answer, "hello", end=FinishReason.LENGTH)
    content = chat_response(request, answers, TOKENIZER, **HEAD)["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{token}" for token in tokens]


def test_token_ids_and_prompt_logprobs_come_where_asked():
    request = chat(return_token_ids=True, prompt_logprobs=1)
    (answer,) = answers = answers_to(request)
    tokens = give(answer, "hello", end=FinishReason.STOP)
    response = chat_response(request, answers, TOKENIZER, **HEAD)
    assert response["prompt_token_ids"] == PROMPT
    assert response["choices"][0]["token_ids"] == tokens
    first, second, *_ = response["prompt_logprobs"]
    assert first is None
    assert second == {
        str(PROMPT[1]): {"logprob": -1.5, "rank": 2, "decoded_token": TOKENIZER.piece(PROMPT[1])},
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": TOKENIZER.piece(5)},
    }
    ChatCompletion.model_validate(response)


def test_a_completion_response_has_the_answers_of_each_prompt_in_turn():
    request = completion(["a b", "c"], n=2)
    prompts = [TOKENIZER.encode("a b"), TOKENIZER.encode("c")]
    answers = answers_to(request, prompts)
    for answer, text in zip(answers, ("one", "two", "three", "four"), strict=True):
        give(answer, text, end=FinishReason.LENGTH, num_cached=1)
    response = completion_response(request, answers, TOKENIZER, **HEAD)
    parsed = Completion.model_validate(response)
    assert parsed.object == "text_completion"
    assert [(each.index, each.text) for each in parsed.choices] == [(0, "one"), (1, "two"), (2, "three"), (3, "four")]
    assert parsed.usage.prompt_tokens == sum(map(len, prompts))
    assert parsed.usage.completion_tokens == sum(len(answer.completion.token_ids) for answer in answers)
    assert parsed.usage.prompt_tokens_details.cached_tokens == 2
    assert usage_of(answers).prompt_tokens == parsed.usage.prompt_tokens


def test_echo_puts_the_prompt_first_with_its_logprobs():
    request = completion(echo=True, logprobs=2)
    (answer,) = answers = answers_to(request)
    give(answer, " hello 🚀 world", end=FinishReason.STOP)
    response = completion_response(request, answers, TOKENIZER, **HEAD, echo=["Once upon"])
    (choice,) = response["choices"]
    assert choice["text"] == "Once upon hello 🚀 world"
    logprobs = choice["logprobs"]
    tokens = PROMPT + answer.completion.token_ids
    assert {len(entries) for entries in logprobs.values()} == {len(tokens)}
    assert logprobs["token_logprobs"][:2] == [None, -1.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {TOKENIZER.piece(5): -0.5, TOKENIZER.piece(PROMPT[1]): -1.5}
    for name, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if name != "</s>" and not name.startswith("bytes:"):
            assert choice["text"].startswith(name, offset)
    assert logprobs["text_offset"][-1] == len(choice["text"])


def test_each_answer_has_its_own_prompt_before_it():
    request = completion(["a", "b"], n=2, echo=True)
    answers = answers_to(request, [TOKENIZER.encode("a"), TOKENIZER.encode("b")])
    for answer in answers:
        give(answer, "!", end=FinishReason.LENGTH)
    response = completion_response(request, answers, TOKENIZER, **HEAD, echo=["a", "b"])
    assert [choice["text"] for choice in response["choices"]] == ["a!", "a!", "b!", "b!"]


@pytest.mark.parametrize(
    "tokenizer", [built_tokenizers.byte_level(), built_tokenizers.llama2()], ids=["bytes", "pieces"]
)
def test_offsets_are_where_tokens_begin(tokenizer: Tokenizer):
    tokens = tokenizer.encode("hello world the end", add_special_tokens=False)
    offsets = TextOffsets(tokenizer)
    text = tokenizer.decode(tokens)
    for place, token in enumerate(tokens):
        assert offsets.place(token) == len(tokenizer.decode(tokens[:place])), (text, place)


def test_a_chat_stream_is_one_of_openai():
    request = chat(stream=True)
    answers = answers_to(request)
    data = play(
        chat_stream(request, answers, TOKENIZER, **HEAD), answers, ["hello", " world", ""], end=FinishReason.STOP
    )
    assert data.endswith(b"data: [DONE]\n\n")
    chunks = events(data)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        assert {name: chunk[name] for name in HEAD} == HEAD
        assert chunk["object"] == "chat.completion.chunk"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "hello"},
        {"content": " world"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


def test_without_stream_options_the_last_chunk_has_usage_and_one_choice():
    request = chat(stream=True, n=2)
    answers = answers_to(request)
    data = play(chat_stream(request, answers, TOKENIZER, **HEAD), answers, ["hello", " world"], end=FinishReason.LENGTH)
    *others, last = events(data)
    assert all("usage" not in chunk for chunk in others)
    assert [(each["index"], each["delta"], each["finish_reason"]) for each in last["choices"]] == [(1, {}, "length")]
    assert last["usage"] == usage_of(answers).as_json()
    assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in others) == 1


def test_with_include_usage_it_comes_in_a_chunk_of_its_own():
    request = chat(stream=True, stream_options={"include_usage": True})
    answers = answers_to(request)
    data = play(chat_stream(request, answers, TOKENIZER, **HEAD), answers, ["hello", "!", "?"], end=FinishReason.LENGTH)
    *others, last = events(data)
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in others)
    assert last["choices"] == []
    assert last["usage"] == usage_of(answers).as_json()
    assert ChatCompletionChunk.model_validate(last).usage.completion_tokens == len(answers[0].completion.token_ids)
    assert others[-1]["choices"][0]["finish_reason"] == "length"


def test_with_include_usage_false_there_is_none():
    request = chat(stream=True, stream_options={"include_usage": False})
    answers = answers_to(request)
    data = play(chat_stream(request, answers, TOKENIZER, **HEAD), answers, ["hello", "!"], end=FinishReason.LENGTH)
    chunks = events(data)
    assert not any("usage" in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_usage_may_come_with_every_chunk():
    request = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    answers = answers_to(request)
    data = play(chat_stream(request, answers, TOKENIZER, **HEAD), answers, ["!", "?", "."], end=FinishReason.LENGTH)
    chunks = events(data)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(PROMPT)}
    assert chunks[-1]["choices"] == []


def test_nothing_is_sent_while_text_is_held_back():
    request = chat(stream=True, stop="world")
    (answer,) = answers = answers_to(request)
    stream = chat_stream(request, answers, TOKENIZER, **HEAD)
    assert stream.more(0, answer) == b""
    give(answer, "hi")
    assert len(events(stream.more(0, answer))) == 2
    give(answer, "wor")
    assert stream.more(0, answer) == b""
    assert stream.more(0, answer) == b""
    give(answer, "k")
    (chunk,) = events(stream.more(0, answer))
    assert chunk["choices"][0]["delta"] == {"content": "work"}


def test_logprobs_and_tokens_are_streamed_even_where_text_is_held_back():
    request = chat(stream=True, stop="world", logprobs=True, top_logprobs=1, return_token_ids=True)
    (answer,) = answers = answers_to(request)
    stream = chat_stream(request, answers, TOKENIZER, **HEAD)
    tokens = give(answer, "wor")
    first, second = events(stream.more(0, answer))
    assert first["prompt_token_ids"] == PROMPT
    assert second["choices"][0]["delta"] == {"content": ""}
    assert second["choices"][0]["token_ids"] == tokens
    more = give(answer, "k", end=FinishReason.STOP)
    (third,) = events(stream.more(0, answer))
    assert third["choices"][0]["token_ids"] == more
    told = [each["choices"][0]["logprobs"]["content"] for each in (second, third)]
    assert [len(content) for content in told] == [len(tokens), len(more)]
    ChatCompletionChunk.model_validate(third)
    (last,) = events(stream.last())
    assert last["choices"][0]["finish_reason"] == "stop"


def test_a_slow_reader_finds_several_steps_in_one_chunk():
    request = chat(stream=True)
    (answer,) = answers = answers_to(request)
    stream = chat_stream(request, answers, TOKENIZER, **HEAD)
    for text in ("one", " two", " three"):
        give(answer, text)
    _, chunk = events(stream.more(0, answer))
    assert chunk["choices"][0]["delta"]["content"] == "one two three"
    assert stream.more(0, answer) == b""


def test_a_completion_stream_has_the_text_of_each_choice():
    request = completion(["a", "b"], stream=True, n=2, stream_options={"include_usage": True})
    answers = answers_to(request, [TOKENIZER.encode("a"), TOKENIZER.encode("b")])
    stream = completion_stream(request, answers, TOKENIZER, **HEAD)
    chunks = events(play(stream, answers, ["hello", " world"], end=FinishReason.LENGTH))
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        assert chunk["object"] == "text_completion"
        Completion.model_validate(chunk | {"choices": [choice | {"finish_reason": choice["finish_reason"] or "stop"}]})
    assert texts == dict.fromkeys(range(4), "hello world")
    assert chunks[-1]["usage"]["prompt_tokens"] == 2


def test_a_streamed_echo_comes_first_and_offsets_go_on_after_it():
    request = completion(stream=True, echo=True, logprobs=1, return_token_ids=True)
    answers = answers_to(request)
    stream = completion_stream(request, answers, TOKENIZER, **HEAD, echo=["Once upon"])
    chunks = events(play(stream, answers, [" hello", " world"], end=FinishReason.LENGTH))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [each["text"] for each in choices] == ["Once upon", " hello", " world", ""]
    assert choices[0]["prompt_token_ids"] == PROMPT
    assert choices[0]["logprobs"]["token_logprobs"][0] is None
    assert choices[1]["logprobs"]["text_offset"][0] == len("Once upon")
    assert choices[2]["logprobs"]["text_offset"][0] == len("Once upon hello")
    told = [token for each in choices for token in each.get("token_ids", [])]
    assert told == answers[0].completion.token_ids


def test_an_error_ends_a_stream_without_done():
    request = chat(stream=True)
    answers = answers_to(request)
    data = chat_stream(request, answers, TOKENIZER, **HEAD).error(EngineDead("The engine has died.", status=500))
    assert events(data) == [
        {
            "error": {
                "message": "The engine has died.",
                "type": "server_error",
                "param": None,
                "code": "engine_dead",
            }
        }
    ]
    assert b"[DONE]" not in data


@pytest.mark.parametrize("name", ['a "quoted" \\ name', "100%d", "名前"])
def test_any_text_and_any_name_is_written_as_json(name):
    request = chat(stream=True)
    answers = answers_to(request)
    stream = chat_stream(request, answers, TOKENIZER, id="x", created=1, model=name)
    text = 'q"\\ \n\t </b> 🚀'
    chunks = events(play(stream, answers, ["x", text, "y"], end=FinishReason.LENGTH))
    assert {chunk["model"] for chunk in chunks} == {name}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == f"x{text}y"
