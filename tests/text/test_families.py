"""Every family's own files give its prompts, as transformers writes them, and its end tokens."""

import re
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from family_files import ASKED, INSTRUCTED, Family, write_family
from transformers import PreTrainedTokenizerFast

from hex_llm.errors import RequestError
from hex_llm.text.chat import encode_chat, render_chat
from hex_llm.text.detokenizer import Detokenizer
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.text.tokenizer_files import TokenizerJson, read_tokenizer

every_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a family's files are, written once."""
    written: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in written:
            written[name] = tmp_path_factory.mktemp(name)
            write_family(FAMILIES[name], written[name])
        return written[name]

    return of


def undated(text: str) -> str:
    return re.sub(r"Current date: \d{4}-\d\d-\d\d", "Current date: TODAY", text)


def transformers_tokenizer(family: Family, folder: Path) -> Any:
    source = PreTrainedTokenizerFast.from_pretrained(str(folder))
    if family.template_file == "json":  # which only a processor would read
        source.chat_template = family.template
    return source


def in_parts(messages: list[dict[str, str]]) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


@every_family
def test_a_conversation_is_written_as_the_family_writes_it(folder, name: str):
    family, tokenizer = FAMILIES[name], Tokenizer.load(folder(name))
    assert undated(render_chat(tokenizer, family.messages)) == family.prompt
    assert undated(render_chat(tokenizer, in_parts(family.messages))) == family.prompt


@every_family
def test_the_tokens_of_a_conversation_are_those_of_transformers(folder, name: str):
    family, tokenizer = FAMILIES[name], Tokenizer.load(folder(name))
    theirs = transformers_tokenizer(family, folder(name))
    # A template that only reads parts shows transformers nothing of strings.
    messages = in_parts(family.messages) if name == "llama-guard-3-1b" else family.messages
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encode_chat(tokenizer, family.messages) == expected


@every_family
def test_the_marks_of_the_template_are_single_tokens_and_none_is_added(folder, name: str):
    family, tokenizer = FAMILIES[name], Tokenizer.load(folder(name))
    ids = encode_chat(tokenizer, family.messages)
    assert {name: ids.count(id) for name, id in family.tokens.items()} == {
        name: family.prompt.count(name) for name in family.tokens
    }
    if family.adds_bos:  # to a text, so that one that begins with it would have two
        assert tokenizer.encode(family.prompt)[0] == tokenizer.bos_id


@every_family
def test_end_tokens_are_those_of_all_of_the_familys_files(folder, name: str):
    assert Tokenizer.load(folder(name)).eos_ids == FAMILIES[name].stops


@every_family
def test_the_files_are_read_without_transformers(folder, name: str):
    assert isinstance(read_tokenizer(folder(name), "auto"), TokenizerJson)


@every_family
def test_special_tokens_are_text_where_they_are_asked_for_and_else_not(folder, name: str):
    family, tokenizer = FAMILIES[name], Tokenizer.load(folder(name))
    letters = tokenizer.encode("ok", add_special_tokens=False)
    for token, id in family.tokens.items():
        shown, hidden = (Detokenizer(tokenizer, skip_special_tokens=skip) for skip in (False, True))
        assert shown.push([*letters, id]) + shown.finish() == "ok" + token
        assert hidden.push([*letters, id]) + hidden.finish() == ("ok" + token if token in family.not_special else "ok")


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.takes_system])
def test_a_system_message_is_refused_where_the_family_knows_none(folder, name: str):
    with pytest.raises(RequestError, match="The chat template refuses the messages"):
        render_chat(Tokenizer.load(folder(name)), INSTRUCTED)


def test_a_string_reaches_a_template_that_reads_parts_only(folder):
    tokenizer = Tokenizer.load(folder("llama-guard-3-1b"))
    assert "User: Bye?" in render_chat(tokenizer, ASKED)
    assert render_chat(tokenizer, ASKED) == render_chat(Tokenizer.load(folder("llama-guard-3-8b")), ASKED)


def test_gemma_3_loses_no_part_of_a_system_message(folder):
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    text = render_chat(Tokenizer.load(folder("gemma-3")), messages)
    # The template takes the first part of a system message only, so that it gets one string.
    assert text.startswith("<bos><start_of_turn>user\nBe brief.\nBe kind.\n\nBe brief.Be kind.<end_of_turn>\n")


def test_an_open_message_in_parts_ends_where_transformers_ends_it(folder):
    family = FAMILIES["gemma-3"]
    messages = in_parts([*ASKED[:1], {"role": "assistant", "content": "Well, "}])
    theirs = transformers_tokenizer(family, folder("gemma-3"))
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert render_chat(Tokenizer.load(folder("gemma-3")), messages, **options) == expected
    assert expected.endswith("<start_of_turn>model\nWell,")


@pytest.mark.parametrize("name", ["llama-3.1", "qwen2.5", "gpt-oss"])
def test_arguments_of_calls_come_as_json_and_are_written_as_json(folder, name: str):
    def called(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        return [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "no"}]

    tokenizer = Tokenizer.load(folder(name))
    text = render_chat(tokenizer, called('{"where": "up"}'))
    assert '{"where": "up"}' in text
    assert text == render_chat(tokenizer, called({"where": "up"}))
    for broken in ('{"where": ', "7", ""):
        assert render_chat(tokenizer, called(broken))
