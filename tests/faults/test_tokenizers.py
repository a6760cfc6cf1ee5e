"""Tokenizers and templates that are missing, damaged or of another model (F22)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hex_llm.errors import RequestError
from hex_llm.text.chat import render_chat
from hex_llm.text.tokenizer import Tokenizer
from tests.checkpoints import write_llama
from tests.faults.oracles import check_oracles
from tests.faults.starts import End, refused, server_end, slowest
from tests.faults.suite import record, sized
from tests.server.servers import running_server

SETTINGS = "tokenizer_config.json"
HELLO = [{"role": "user", "content": "hello"}]


def change(folder: Path, name: str, **fields: object) -> None:
    """A field that is None goes."""
    values = json.loads((folder / name).read_text()) | fields
    (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def cut(folder: Path, name: str) -> None:
    (folder / name).write_text((folder / name).read_text()[:500])


BROKEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing": (lambda folder: (folder / "tokenizer.json").unlink(), ["holds no tokenizer"]),
    "cut": (lambda folder: cut(folder, "tokenizer.json"), ["tokenizer.json"]),
    "empty": (lambda folder: (folder / "tokenizer.json").write_text(""), ["tokenizer.json"]),
    "of another kind": (lambda folder: (folder / "tokenizer.json").write_text('{"a": 1}'), ["tokenizer.json"]),
    "an LFS pointer": (
        lambda folder: (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n"),
        ["tokenizer.json", "git lfs pull"],
    ),
    "settings cut": (lambda folder: (folder / SETTINGS).write_text('{"bos_token": "<s'), [SETTINGS]),
    "a template that is a number": (
        lambda folder: change(folder, SETTINGS, chat_template=3), [SETTINGS, "chat_template"],
    ),
    "an end token that is a text": (
        lambda folder: change(folder, "generation_config.json", eos_token_id="</s>"), ["generation_config.json"],
    ),
    "more tokens than the model embeds": (
        lambda folder: write_llama(folder, vocab_size=100), ["highest token id is 258", "embeds 100 tokens"],
    ),
}  # fmt: skip


def written(tmp_path: Path, kind: str) -> Path:
    folder = write_llama(tmp_path / kind.replace(" ", "-"))
    BROKEN[kind][0](folder)
    return folder


def check(kind: str, end: End) -> None:
    assert end.code == 3, end.said
    assert "\n" not in end.said
    for word in BROKEN[kind][1]:
        assert word in end.said


def test_a_tokenizer_that_cannot_be_used_ends_the_start(tmp_path, capsys):
    ends = {kind: refused(capsys, str(written(tmp_path, kind)), "--max_model_len=64") for kind in BROKEN}
    for kind, end in ends.items():
        check(kind, end)
    record("F22", f"{len(ends)} of {len(BROKEN)} tokenizers are refused with exit 3, {slowest(ends)}")


def test_a_whole_server_ends_with_the_same_code_and_line(tmp_path):
    kinds = sized(["cut"], [*BROKEN])
    ends = {kind: server_end(f"--model={written(tmp_path, kind)}", "--port=0") for kind in kinds}
    for kind, end in ends.items():
        check(kind, end)
    record("F22", f"{len(ends)} of {len(kinds)} servers end with exit 3, {slowest(ends)}")


def test_a_model_without_a_template_and_an_end_completes_and_says_why_it_does_not_chat(tmp_path):
    folder = write_llama(tmp_path / "model", eos_token_id=None)
    change(folder, SETTINGS, chat_template=None, eos_token=None)
    change(folder, "generation_config.json", eos_token_id=None)
    with running_server(folder, tmp_path / "log") as server:
        chat = server.post("/v1/chat/completions", {"messages": HELLO})
        assert (chat.status_code, chat.json()["error"]["code"]) == (400, "chat_template_missing")
        answer = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 8})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        check_oracles(server)
    record(
        "F22", "without a template and without an end token it starts: chats 400 chat_template_missing, completions 200"
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for message in messages %}{{", "line 1 is no jinja"),
        ("{{ raise_exception('Say please.') }}", "refuses the messages: Say please."),
        ("{{ messages[9].content.text }}", "a value that the messages do not have"),
    ],
)
def test_a_template_that_fails_costs_its_request(template, words, tmp_path):
    """The model still starts, and tells what the template says (tests/text has how other templates fail)."""
    folder = write_llama(tmp_path / "model")
    change(folder, SETTINGS, chat_template=template)
    with pytest.raises(RequestError, match=words) as caught:
        render_chat(Tokenizer.load(folder), HELLO)
    assert caught.value.status == 400
    record("F22", f'a template that is `{template}`: 400, "{caught.value}"')
