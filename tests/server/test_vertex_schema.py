"""Bodies of /generate: what they ask for, and how they are refused."""

import orjson
import pytest

from hex_llm.completion import Answer, Completion
from hex_llm.config import Config
from hex_llm.engine.output import Output
from hex_llm.engine.request import FinishReason, Request, SamplingParams, TokenLogprobs
from hex_llm.errors import EngineDead, Overloaded, RequestError, Unsupported
from hex_llm.server.chat_schema import ChatRequest
from hex_llm.server.vertex import Predictions
from hex_llm.server.vertex_schema import GenerateRequest, Place, PromptRequest, read_generate

CONFIG = Config()
HELLO = {"role": "user", "content": "hello"}
CHAT = {"@requestFormat": "chatCompletions", "messages": [HELLO]}


def read(body: dict, config: Config = CONFIG, **defaults: float) -> GenerateRequest:
    return read_generate(body, config, defaults)


def one(**members: object) -> PromptRequest:
    (prompt,) = read({"prompt": "hi", **members}).prompts
    return prompt


def refusal(body: dict, config: Config = CONFIG) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(body, config)
    return caught.value


def test_the_instance_of_the_notebooks_is_read():
    instance = {"prompt": "What is a car?", "max_tokens": 50, "temperature": 1.0, "top_p": 1.0, "top_k": 1}
    asked = read({"instances": [instance]})
    assert asked.wrapped
    assert not asked.chats
    sampling = SamplingParams(max_tokens=50, temperature=1.0, top_p=1.0, top_k=1)
    assert asked.prompts == (PromptRequest(prompt="What is a car?", sampling=sampling),)


def test_a_body_without_instances_is_an_instance():
    asked = read({"prompt": "hi", "max_tokens": 7, "ignore_eos": True, "streaming_tokens": 2048})
    assert not asked.wrapped
    sampling = SamplingParams(max_tokens=7, ignore_eos=True)
    assert asked.prompts == (PromptRequest(prompt="hi", sampling=sampling, flush_every=2048),)


def test_max_tokens_is_as_in_hex_llm():
    assert one(max_tokens=0).sampling.max_tokens is None
    assert one(max_tokens=0.0).sampling.max_tokens is None
    assert one(max_tokens=1).sampling.max_tokens == 1
    assert one().sampling.max_tokens == 16
    assert one(max_tokens=None).sampling.max_tokens == 16


def test_an_integer_too_large_for_64_bits_is_no_double_that_is_just_small_enough():
    assert one(seed=-(2**63)).sampling.seed == -(2**63)
    too_small = orjson.loads(b"-9223372036854775809")  # orjson makes a float of it, which is -(2**63)
    assert refusal({"prompt": "hi", "seed": too_small}).param == "seed"


def test_whole_numbers_may_come_as_doubles():
    sampling = one(top_k=1.0, max_tokens=50.0, seed=3.0, n=1.0, min_tokens=2.0, stop_token_ids=[2.0]).sampling
    assert (sampling.top_k, sampling.max_tokens, sampling.seed, sampling.n) == (1, 50, 3, 1)
    assert type(sampling.top_k) is type(sampling.max_tokens) is int
    assert one(prompt=[1.0, 2.0]).prompt == [1, 2]
    assert one(streaming_tokens=4.0).flush_every == 4


def test_what_the_model_recommends_counts_where_nothing_is_said():
    (prompt,) = read({"prompt": "hi", "top_p": 0.5}, temperature=0.6, top_p=0.9).prompts
    assert (prompt.sampling.temperature, prompt.sampling.top_p) == (0.6, 0.5)


def test_parameters_are_defaults_of_every_instance():
    body = {
        "instances": [{"prompt": "a"}, {"prompt": "b", "top_k": 5}, {"prompt": "c", "top_k": None}],
        "parameters": {"top_k": 3, "max_tokens": 9, "stream": True, "raw_response": True},
    }
    prompts = read(body).prompts
    assert [each.sampling.top_k for each in prompts] == [3, 5, 3]
    assert all(each.sampling.max_tokens == 9 and each.framed and each.raw for each in prompts)
    assert read({"instances": [{"prompt": "a"}], "parameters": None}).prompts[0].prompt == "a"


def test_streams_are_framed_and_flushed_as_asked():
    assert (one().flush_every, one().framed) == (None, False)
    assert (one(stream=False).flush_every, one(stream=False).framed) == (None, False)
    assert (one(stream=True).flush_every, one(stream=True).framed) == (1, True)
    assert (one(streaming_tokens=5).flush_every, one(streaming_tokens=5).framed) == (5, False)
    both = one(stream=True, streaming_tokens=5)
    assert (both.flush_every, both.framed) == (5, True)


def test_a_raw_response_needs_log_probabilities():
    assert one(raw_response=True).sampling.logprobs == 0
    assert one(raw_response=False).sampling.logprobs is None


def test_a_chat_at_the_top_is_a_chat():
    asked = read({**CHAT, "model": "hexllm", "max_tokens": 12.0, "stream": True, "temperature": 0})
    (chat,) = asked.chats
    assert isinstance(chat, ChatRequest)
    assert not asked.wrapped
    assert (chat.model, chat.sampling.max_tokens, chat.stream, chat.include_usage) == (None, 12, True, None)
    assert chat.messages == [HELLO]


def test_chats_may_be_instances():
    body = {"instances": [CHAT, {**CHAT, "n": 2}], "parameters": {"max_tokens": 4, "top_k": 2}}
    asked = read(body)
    assert asked.wrapped
    assert [(chat.sampling.n, chat.sampling.max_tokens) for chat in asked.chats] == [(1, 4), (2, 4)]
    marked = read({"instances": [{"messages": [HELLO]}], "parameters": {"@requestFormat": "chatCompletions"}})
    assert len(marked.chats) == 1


def test_what_vertex_says_about_its_own_filters_is_passed_over():
    settings = {"enabled": False, "llama_guard_settings": {}}
    assert read({**CHAT, "google": {"model_safety_settings": settings}, "model_safety_settings": settings}).chats


def test_an_empty_adapter_is_none():
    for name in ("dynamic-lora", "dynamic_lora", "lora_id", "lora_path"):
        assert one(**{name: ""}).prompt == "hi"
        assert read({**CHAT, name: ""}).chats
        for body in ({"prompt": "hi", name: "gs://a/b"}, {**CHAT, name: "gs://a/b"}):
            error = refusal(body)
            assert isinstance(error, Unsupported)
            assert error.param == name
            assert "--enable_lora" in str(error)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("top_k", 1.5), ("top_k", "1"), ("top_k", True), ("top_k", -2), ("max_tokens", -1), ("max_tokens", 0.5),
        ("max_tokens", 1e300), ("max_tokens", "10"), ("temperature", -1), ("temperature", 1e9), ("top_p", 0),
        ("streaming_tokens", 0), ("streaming_tokens", 1.5), ("streaming_tokens", -4), ("stream", 1),
        ("raw_response", "yes"), ("ignore_eos", 0), ("n", 2), ("n", True), ("best_of", 2), ("logprobs", 1),
        ("prompt_logprobs", 1), ("stop", [1]), ("seed", 1.5), ("messages", [HELLO]), ("max_completion_tokens", 3),
        ("max_tokns", 3), ("prompt", ""), ("prompt", []), ("prompt", 7), ("prompt", {}), ("prompt", [1, "a"]),
        ("prompt", [1.5]), ("prompt", [-1]), ("prompt", ["a", "b"]), ("prompt", None), ("dynamic-lora", 7),
        ("@requestFormat", "text"), ("@requestFormat", 7), ("cache_salt", ""), ("tools", []),
    ],
)  # fmt: skip
def test_a_bad_member_is_refused_by_name(member, value):
    bare = refusal({"prompt": "hi", member: value})
    assert (bare.param or "").split("[")[0] == member
    assert member in str(bare)
    placed = refusal({"instances": [{"prompt": "hi"}, {"prompt": "hi", member: value}]})
    assert placed.param == f"instances[1].{bare.param}"
    assert "instances[1]" in str(placed)


def test_a_bad_default_is_named_where_it_stands():
    error = refusal({"instances": [{"prompt": "hi"}], "parameters": {"top_k": 1.5}})
    assert error.param == "parameters.top_k"
    assert str(error).startswith("parameters.top_k=1.5 must be ")
    own = refusal({"instances": [{"prompt": "hi", "top_k": 1.5}], "parameters": {"top_k": 2}})
    assert own.param == "instances[0].top_k"
    chat = refusal({"instances": [{**CHAT, "messages": [{"role": "user"}]}]})
    assert chat.param == "instances[0].messages[0].content"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"max_tokens": 3}, "prompt"),
        ({"instances": []}, "instances"),
        ({"instances": None}, "instances"),
        ({"instances": {"prompt": "hi"}}, "instances"),
        ({"instances": "hi"}, "instances"),
        ({"instances": ["hi"]}, "instances[0]"),
        ({"instances": [{"prompt": "hi"}, None]}, "instances[1]"),
        ({"instances": [{}]}, "instances[0].prompt"),
        ({"instances": [{"prompt": "hi"}] * 129}, "instances"),
        ({"instances": [{"prompt": "hi"}], "parameters": []}, "parameters"),
        ({"instances": [{"prompt": "hi"}], "parameters": {"topk": 1}}, "parameters.topk"),
        ({"instances": [{"prompt": "hi"}], "stream": True}, "stream"),
        ({"instances": [{"prompt": "hi"}], "@requestFormat": "chatCompletions"}, "@requestFormat"),
        ({"parameters": {"top_k": 1}, "prompt": "hi"}, "parameters"),
        ({"messages": [HELLO]}, "messages"),
        ({"@requestFormat": "chatCompletions"}, "messages"),
        ({**CHAT, "prompt": "hi"}, "prompt"),
        ({**CHAT, "streaming_tokens": 3}, "streaming_tokens"),
        ({**CHAT, "raw_response": True}, "raw_response"),
        ({"instances": [{"prompt": "hi"}, CHAT]}, "instances"),
        ({"instances": [CHAT, {**CHAT, "stream": True}]}, "instances[1].stream"),
        ({"instances": [{**CHAT, "n": 128}, {**CHAT, "n": 128}, CHAT]}, "instances"),
        ({"instances": [{"prompt": "a"}, {"prompt": "b", "stream": True}]}, "instances[1].stream"),
        ({"instances": [{"prompt": "a"}, {"prompt": "b", "streaming_tokens": 2}]}, "instances[1].streaming_tokens"),
        ({"instances": [{"prompt": "a"}, {"prompt": "b", "raw_response": True}]}, "instances[1].raw_response"),
        ({"instances": [{"prompt": "a", "cache_salt": "x"}, {"prompt": "b"}]}, "instances[1].cache_salt"),
    ],
)
def test_a_bad_body_is_refused_with_the_place(body, param):
    error = refusal(body)
    assert error.param == param
    assert error.status == 400


def test_the_limit_of_instances_is_a_flag():
    body = {"instances": [{"prompt": "hi"}] * 3}
    assert len(read(body, Config(max_instances=3)).prompts) == 3
    assert "--max_instances" in str(refusal(body, Config(max_instances=2)))


def test_messages_without_their_mark_are_refused_with_a_hint():
    assert '"@requestFormat": "chatCompletions"' in str(refusal({"messages": [HELLO]}))


def test_reading_leaves_the_body_as_it_was():
    body = {"instances": [dict(CHAT)], "parameters": {"dynamic-lora": "", "max_tokens": 3}}
    before = orjson.dumps(body)
    read(body)
    assert orjson.dumps(body) == before


def test_an_error_about_the_server_has_no_place_in_the_body():
    place = Place("instances[0]", {"prompt": "hi"}, {})
    error = Overloaded("Too much.")
    assert place.locate(error) is error
    located = place.locate(RequestError("The prompt is empty.", param="prompt"))
    assert (str(located), located.param) == ("instances[0]: The prompt is empty.", "instances[0].prompt")


class Letters:
    """A stand-in for a detokenizer: token 65 is the letter A."""

    stop_reason = None

    def push(self, tokens: tuple[int, ...]) -> str:
        return "".join(map(chr, tokens))

    def finish(self) -> str:
        return ""


def answer(raw: bool = False) -> Answer:
    request = Request(id="0", prompt=[1], sampling=SamplingParams(), max_output=9)
    return Answer(request, Completion(0, logprobs=[] if raw else None), Letters())  # pyright: ignore[reportArgumentType]


def take(answer: Answer, text: str, *, last: bool = False) -> None:
    answer.take(
        Output(
            "0",
            tuple(ord(letter) for letter in text),
            logprobs=(TokenLogprobs(-0.5, 1, ()),) * len(text),
            finish_reason=FinishReason.LENGTH if last else None,
        )
    )


def asked(predictions: Predictions, answers: list[Answer], ended: set[int]) -> bytes:
    """What a stream would send: it asks for those that had not ended when it last asked."""
    news = [(place, each) for place, each in enumerate(answers) if place not in ended]
    data = b"".join(predictions.more(place, each) for place, each in news)
    ended.update(place for place, each in news if each.finished)
    return data


def test_pieces_come_every_so_many_tokens_and_at_the_end():
    one = answer()
    predictions, ended = Predictions([one], every=3, framed=False, raw=False), set()
    sent = []
    for place, letter in enumerate("abcdefgh", start=1):
        take(one, letter, last=place == 8)
        sent.append(asked(predictions, [one], ended))
    assert sent == [
        b"",
        b"",
        b'{"predictions":["abc"]}',
        b"",
        b"",
        b'{"predictions":["def"]}',
        b"",
        b'{"predictions":["gh"]}',
    ]
    assert predictions.first() == predictions.last() == predictions.keep_alive == b""


def test_a_piece_has_an_entry_for_every_instance():
    answers = [answer(raw=True), answer(raw=True), answer(raw=True)]
    predictions, ended = Predictions(answers, every=1, framed=True, raw=True), set()
    take(answers[0], "ab")
    take(answers[2], "x", last=True)
    first = asked(predictions, answers, ended)
    assert first.endswith(b"\0")
    assert orjson.loads(first[:-1]) == {
        "predictions": ["ab", "", "x"],
        "output_token_counts": [2, 0, 1],
        "cumulative_logprobs": [-1.0, 0.0, -0.5],
    }
    assert asked(predictions, answers, ended) == b""
    take(answers[1], "q", last=True)
    assert orjson.loads(asked(predictions, answers, ended)[:-1])["predictions"] == ["", "q", ""]
    take(answers[0], "", last=True)
    last = orjson.loads(asked(predictions, answers, ended)[:-1])
    assert last == {
        "predictions": ["", "", ""],
        "output_token_counts": [0, 0, 0],
        "cumulative_logprobs": [-1.0, -0.5, -0.5],
    }


def test_instances_that_end_together_share_the_last_piece():
    answers = [answer(), answer()]
    predictions, ended = Predictions(answers, every=1, framed=False, raw=False), set()
    take(answers[0], "a", last=True)
    take(answers[1], "b", last=True)
    assert asked(predictions, answers, ended) == b'{"predictions":["a","b"]}'


def test_tokens_that_a_stop_string_took_away_do_not_count():
    one = answer(raw=True)
    predictions, ended = Predictions([one], every=1, framed=False, raw=True), set()
    take(one, "abc")
    first = orjson.loads(asked(predictions, [one], ended))
    take(one, "", last=True)
    for told in (one.completion.token_ids, one.completion.logprobs):
        assert told is not None
        told.pop()
    last = orjson.loads(asked(predictions, [one], ended))
    assert first["output_token_counts"][0] + last["output_token_counts"][0] == 2
    assert last["cumulative_logprobs"] == [-1.0]


def test_an_answer_without_text_has_a_piece_all_the_same():
    one = answer()
    take(one, "", last=True)
    assert Predictions([one], every=5, framed=False, raw=False).more(0, one) == b'{"predictions":[""]}'


def test_an_error_in_a_stream_is_framed_like_its_pieces():
    error = EngineDead("Gone.")
    framed = Predictions([answer()], every=1, framed=True, raw=False)
    bare = Predictions([answer()], every=1, framed=False, raw=False)
    assert framed.error(error) == bare.error(error) + b"\0"
    assert orjson.loads(bare.error(error))["error"]["code"] == "engine_dead"
