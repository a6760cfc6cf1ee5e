"""Templates give what transformers gives, and fail in our own words."""

import functools
import random
from typing import Any

import jinja2
import pytest
from built_tokenizers import train_byte_level
from templates import LLAMA2, QWEN3, STYLES
from transformers import PreTrainedTokenizerFast

from hex_llm.errors import ContextTooLong, RequestError
from hex_llm.text.chat import render_chat
from hex_llm.text.template import load_template, render
from hex_llm.text.tokenizer import Tokenizer

WORDS = ["Hi", " ", "\n", "é", "<b>", "'", '"', "{{ x }}", "{% if %}", "你好", "</think>", "end.", "\t"]


@functools.cache
def source() -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=train_byte_level(300, ["<s>", "</s>", "<|img|>"]),
        bos_token="<s>",
        eos_token="</s>",
        image_token="<|img|>",
    )


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(source())


def conversation(choose: random.Random) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * choose.randrange(1, 4)
    roles = choose.choice([[], ["system"]]) + roles[: choose.randrange(1, len(roles) + 1)]
    if choose.random() < 0.2:
        choose.shuffle(roles)
    if choose.random() < 0.2:
        roles.append("tool")
    messages = [{"role": role, "content": "".join(choose.choices(WORDS, k=choose.randrange(6)))} for role in roles]
    for message in messages:
        if message["role"] == "assistant" and choose.random() < 0.2:
            message["tool_calls"] = [{"function": {"name": "né", "arguments": {"b": [1, None], "a": "<"}}}]
    return messages


def ours(template: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return render_chat(tokenizer(), messages, template=template, **options)
    except RequestError:
        return None


def theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return source().apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    except (ValueError, TypeError, LookupError, jinja2.TemplateError):
        return None


@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_template_gives_what_transformers_gives(style: str):
    rendered = 0
    for seed in range(200):
        messages = conversation(random.Random(seed))
        opened: dict[str, Any]
        for opened in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True},
        ):
            text = ours(STYLES[style], messages, **opened)
            assert text == theirs(STYLES[style], messages, **opened)
            rendered += text is not None
    assert rendered > 100


def test_a_variable_of_a_request_reaches_the_template():
    messages = [{"role": "user", "content": "Hi"}]
    for value in (True, False):
        expected = theirs(QWEN3, messages, add_generation_prompt=True, enable_thinking=value)
        assert ours(QWEN3, messages, template_kwargs={"enable_thinking": value}) == expected
    template = "{{ image_token }}{{ mood }}{{ tools is none }}{{ documents is none }}"
    text = render_chat(
        tokenizer(), messages, template=template, template_kwargs={"mood": ["x"]}, allowed_kwargs={"mood"}
    )
    assert text == "<|img|>['x']TrueTrue"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"messages": []}, "has 'messages', which is not one of enable_thinking"),
        ({"bos_token": "x"}, "has 'bos_token'"),
        ({"x" * 5000: 1}, r"x\.\.\., which is not one of"),
        ({"enable_thinking": "false"}, "enable_thinking is a str, not true or false"),
    ],
)
def test_other_variables_are_refused(kwargs: dict[str, Any], words: str):
    with pytest.raises(RequestError, match=words) as raised:
        render_chat(tokenizer(), [{"role": "user", "content": "Hi"}], template=QWEN3, template_kwargs=kwargs)
    assert raised.value.param == "chat_template_kwargs"
    assert len(str(raised.value)) < 300


def test_a_variable_that_the_template_does_not_know_is_refused_unless_it_asks_for_nothing():
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match="'enable_thinking', which the model's chat template knows nothing of"):
        render_chat(tokenizer(), messages, template=LLAMA2, template_kwargs={"enable_thinking": True})
    assert render_chat(tokenizer(), messages, template=LLAMA2, template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.content", "not valid: line 1 is no jinja"),
        ("\n\n{% frobnicate %}", "not valid: line 3"),
        ("{{ raise_exception('Say please.') }}", "refuses the messages: Say please."),
        ("{{ raise_exception('x' * 9000) }}", "refuses the messages: xxx"),
        ("{{ messages[9].content.text }}", "a value that the messages do not have"),
        ("{{ {}['x'].y }}", "a value that the messages do not have"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "may not do"),
        ("{{ messages.append(1) }}", "may not do"),
        ("{{ 1 / 0 }}", "fails on these messages"),
        ("{{ 'a' + 1 }}", "fails on these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on these messages"),
        ("{{ messages | tojson | nosuchfilter }}", "not valid"),
    ],
)
def test_failures_are_told_in_our_own_words(template: str, words: str):
    with pytest.raises(RequestError, match=words) as raised:
        render_chat(tokenizer(), [{"role": "user", "content": "Hi"}], template=template)
    said = str(raised.value)
    assert len(said) < 1100
    assert not any(word in said for word in ("object", "Error", "0x", "jinja2", "sandbox", "hex_llm", "str"))


def test_a_template_is_read_once():
    assert load_template(QWEN3) is load_template(QWEN3)


def test_a_text_without_end_is_cut_short():
    with pytest.raises(ContextTooLong, match="more than 1000 characters"):
        render("{% for i in range(100000) %}{% for j in range(100000) %}ab{% endfor %}{% endfor %}", {}, max_chars=1000)
    assert len(render("{% for i in range(500) %}ab{% endfor %}", {}, max_chars=1000)) == 1000


@pytest.mark.parametrize("content", ["The answer is", "The answer is ", "[hex-llm:continue-here] so", ""])
def test_a_final_message_that_is_left_open_ends_where_the_template_lets_it(content: str):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    for style in STYLES.values():
        options = {"add_generation_prompt": False, "continue_final_message": True}
        assert ours(style, messages, **options) == theirs(style, messages, **options)


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[-1].content | upper }}"])
def test_a_message_that_the_template_does_not_show_cannot_be_continued(template: str):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "so"}]
    with pytest.raises(RequestError, match="cannot be continued") as raised:
        render_chat(tokenizer(), messages, template=template, add_generation_prompt=False, continue_final_message=True)
    assert raised.value.param == "continue_final_message"
