"""Conversations become the prompts that the model's template makes of them."""

import functools
from typing import Any

import pytest
from built_tokenizers import byte_level, train_byte_level
from transformers import PreTrainedTokenizerFast

from hex_llm.errors import ChatTemplateMissing, RequestError
from hex_llm.text.chat import encode_chat, render_chat
from hex_llm.text.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('This model calls no tools!') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@functools.cache
def tokenizer(template: Any = TEMPLATE) -> Tokenizer:
    source = PreTrainedTokenizerFast(
        tokenizer_object=train_byte_level(300, ["<s>", "</s>"]), bos_token="<s>", eos_token="</s>", add_bos_token=True
    )
    source.chat_template = template
    return Tokenizer(source)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_messages_are_rendered_and_the_answer_opened():
    messages = [{"role": "system", "content": "Be brief."}, user("Hi")]
    assert render_chat(tokenizer(), messages) == "<s>[system]Be brief.</s>[user]Hi</s>[assistant]"
    assert render_chat(tokenizer(), messages, add_generation_prompt=False).endswith("[user]Hi</s>")


def test_the_prompt_begins_with_one_bos():
    ids = encode_chat(tokenizer(), [user("Hi")])
    assert tokenizer().encode("Hi")[0] == tokenizer().bos_id  # what encoding the text would have added
    assert ids.count(tokenizer().bos_id or 0) == 1
    assert tokenizer().decode(ids, skip_special_tokens=False) == "<s>[user]Hi</s>[assistant]"


def test_parts_of_text_are_joined_by_lines():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render_chat(tokenizer(), [user(parts)]) == render_chat(tokenizer(), [user("one\ntwo")])


def test_the_final_message_can_be_left_open():
    messages = [user("Hi"), {"role": "assistant", "content": "The answer is"}]
    text = render_chat(tokenizer(), messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<s>[user]Hi</s>[assistant]The answer is"
    with pytest.raises(RequestError, match="both true"):
        render_chat(tokenizer(), messages, continue_final_message=True)


def test_a_given_template_stands_over_the_models():
    assert render_chat(tokenizer(), [user("Hi")], template="{{ messages[0].content }}!") == "Hi!"
    assert render_chat(byte_level(), [user("Hi")], template="{{ messages[0].content }}!") == "Hi!"


def test_an_answer_that_only_called_tools_has_no_content():
    messages = [user("Hi"), {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, user("?")]
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | length if m.tool_calls else '' }}{% endfor %}"
    assert render_chat(tokenizer(), messages, template=template) == "Hi1?"


def test_a_model_without_a_template_says_so():
    with pytest.raises(ChatTemplateMissing, match="no chat template") as raised:
        render_chat(byte_level(), [user("Hi")])
    assert (raised.value.code, raised.value.status) == ("chat_template_missing", 400)


def test_what_the_template_raises_reaches_the_client():
    with pytest.raises(RequestError, match="This model calls no tools!"):
        render_chat(tokenizer(), [{"role": "tool", "content": "42"}])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content",
        "{{ messages[9].content.text }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_template_that_fails_is_a_refusal_and_not_a_crash(template: str):
    with pytest.raises(RequestError, match="chat template"):
        render_chat(tokenizer(), [user("Hi")], template=template)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ("Hi", "messages is a str"),
        ({"role": "user"}, "messages is a dict"),
        (["Hi"], r"messages\[0\] is a str"),
        ([{"content": "Hi"}], r"messages\[0\].role is None"),
        ([user("a"), {"role": "king", "content": "Hi"}], r"messages\[1\].role is 'king', not one of system, developer"),
        ([{"role": ["user"], "content": "Hi"}], r"messages\[0\].role is \['user'\]"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "assistant", "content": None}], r"messages\[0\].content is missing"),
        ([user(7)], r"messages\[0\].content is a int"),
        ([user(["Hi"])], r"messages\[0\].content\[0\] is a str"),
        ([user([{"type": "image_url"}])], r"messages\[0\].content\[0\].type is 'image_url'"),
        ([user([{"type": "text", "text": None}])], r"messages\[0\].content\[0\].text is a NoneType"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages: Any, words: str):
    with pytest.raises(RequestError, match=words) as raised:
        render_chat(tokenizer(), messages)
    assert raised.value.param is not None
    assert raised.value.param.startswith("messages")
