"""A tokenizer that is read without transformers is the one that transformers would have made."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built_tokenizers import EXACT, TEXT, train_byte_level, word_ends
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from hex_llm.errors import CheckpointError
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.text.tokenizer_files import TokenizerJson, read_tokenizer
from tests.checkpoints import write_tokenizer

HEX_MINI = Path(__file__).parents[2] / "hex_llm/assets/hex-mini"
ALPHABET = TEXT + "<s></s><tool><|end|>[UNK]\t\x00"
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def is_read_as_it_stands(folder: Path) -> bool:
    return isinstance(read_tokenizer(folder, "auto"), TokenizerJson)


def assert_as_transformers_has_it(folder: Path, seed: int = 0, num_texts: int = 60) -> None:
    random_choice = random.Random(seed)
    ours = Tokenizer.load(folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.bos_id == theirs.bos_token_id
    assert theirs.eos_token_id is None or theirs.eos_token_id in ours.eos_ids
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    template = theirs.chat_template
    assert ours.chat_template == (template.get("default") if isinstance(template, dict) else template)
    assert ours.special_ids == Tokenizer(theirs).special_ids
    specials = theirs.all_special_tokens
    for _ in range(num_texts):
        pieces = ["".join(random_choice.choices(ALPHABET, k=random_choice.randrange(12))) for _ in range(4)]
        text = random_choice.choice([*specials, " ", ""]).join(pieces)
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)
            ids = random_choice.choices(range(ours.vocab_size), k=random_choice.randrange(12))
            expected = theirs.decode(ids, skip_special_tokens=special, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=special) == expected


def test_the_embedded_model_is_read_as_it_stands():
    assert is_read_as_it_stands(HEX_MINI)
    assert_as_transformers_has_it(HEX_MINI)


def test_the_tests_own_models_are_read_as_they_stand(tmp_path: Path):
    write_tokenizer(tmp_path)
    assert is_read_as_it_stands(tmp_path)
    assert_as_transformers_has_it(tmp_path)


@pytest.mark.parametrize("build", [*EXACT, word_ends], ids=lambda build: build.__name__)
def test_every_kind_of_tokenizer_that_transformers_saves_is_read_as_it_stands(
    build: Callable[[], Tokenizer], tmp_path: Path
):
    source = build()._source
    source.save_pretrained(tmp_path)
    assert is_read_as_it_stands(tmp_path)
    assert_as_transformers_has_it(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer that starts every text with its first token, as tokenizer.json says, and has an added <think>."""
    tokenizer = train_byte_level(300, ["<s>", "</s>", "<|eot|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    return tmp_path


def as_it_stands(config: dict[str, Any], **files: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    return config, files, True


def by_transformers(config: dict[str, Any], **files: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    return config, files, False


EOT = {"content": "<|eot|>", **FLAGS}
ADDED = {"0": {"content": "<s>", **FLAGS}, "2": EOT}


@pytest.mark.parametrize(
    ("config", "files", "plain"),
    [
        as_it_stands({}),
        as_it_stands({"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": None}),
        as_it_stands({"add_bos_token": False, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}),
        as_it_stands({"bos_token": {"__type": "AddedToken", **EOT}, "eos_token": None}),
        as_it_stands({"image_token": "<|eot|>", "extra_special_tokens": {"audio_token": "</s>"}}),
        as_it_stands({"extra_special_tokens": ["<|eot|>", "</s>"], "added_tokens_decoder": ADDED}),
        as_it_stands({"additional_special_tokens": ["<|eot|>"], "clean_up_tokenization_spaces": True}),
        as_it_stands({"eos_token": "</s>"}, special_tokens_map={"eos_token": "<|eot|>", "bos_token": {**EOT}}),
        as_it_stands({}, special_tokens_map={"additional_special_tokens": ["</s>"]}, added_tokens={"<|eot|>": 2}),
        as_it_stands({"added_tokens_decoder": ADDED}, special_tokens_map={"eos_token": "<new>"}, added_tokens={"x": 9}),
        by_transformers({"eos_token": "<|new|>"}),
        by_transformers({"eos_token": "the"}),  # a token, but no added one
        by_transformers({"eos_token": "<think>"}),  # an added one, but not special
        by_transformers({"audio_token": "<|new|>"}),
        by_transformers({"extra_special_tokens": ["<|new|>"]}),
        by_transformers({"extra_special_tokens": {"audio_token": "<|new|>"}}),
        by_transformers({"additional_special_tokens": [{"__type": "AddedToken", **EOT, "content": "<|new|>"}]}),
        by_transformers({"added_tokens_decoder": {**ADDED, "301": {**EOT, "content": "<|new|>"}}}),
        by_transformers({"added_tokens_decoder": {**ADDED, "2": {**EOT, "lstrip": True}}}),
        by_transformers({"split_special_tokens": True, "eos_token": "</s>"}),
        by_transformers({}, special_tokens_map={"eos_token": "<|new|>"}),
        by_transformers({}, special_tokens_map={"image_token": "<|eot|>"}),
        by_transformers({}, added_tokens={"<|new|>": 301}),
    ],
)
def test_what_transformers_would_add_is_left_to_it(
    folder: Path, config: dict[str, Any], files: dict[str, Any], plain: bool
):
    write(folder, "tokenizer_config.json", config)
    for name, content in files.items():
        write(folder, f"{name}.json", content)
    assert is_read_as_it_stands(folder) == plain
    assert_as_transformers_has_it(folder)


def test_random_files_read_as_transformers_reads_them(folder: Path):
    num_plain = 0
    for seed in range(150):
        choose = random.Random(seed)
        tokens = [
            "<s>",
            "</s>",
            "<|eot|>",
            "<|eot|>",
            *choose.sample(["<think>", "<|new|>", "the"], choose.random() < 0.3),
        ]
        names = ["bos_token", "eos_token", "unk_token", "pad_token", "image_token"]
        config: dict[str, Any] = {name: choose.choice(tokens) for name in choose.sample(names, choose.randrange(4))}
        if choose.random() < 0.4:
            config["added_tokens_decoder"] = dict(choose.sample(list(ADDED.items()), choose.randrange(3)))
        for name in ("extra_special_tokens", "additional_special_tokens"):
            if choose.random() < 0.3:
                config[name] = choose.sample(tokens, 2)
        write(folder, "tokenizer_config.json", config)
        special = {name: choose.choice(tokens) for name in choose.sample(names[:4], choose.randrange(3))}
        write(folder, "special_tokens_map.json", special)
        added = {token: id for id, token in enumerate(("<s>", "</s>", "<|eot|>"))} if choose.random() < 0.3 else {}
        write(folder, "added_tokens.json", added)
        num_plain += is_read_as_it_stands(folder)
        assert_as_transformers_has_it(folder, seed, num_texts=3)
    assert 50 < num_plain < 150


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config.json": {"chat_template": "of the config"}},
        {"tokenizer_config.json": {"chat_template": "of the config"}, "chat_template.jinja": "of the file\n"},
        {
            "tokenizer_config.json": {
                "chat_template": [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
            }
        },
        {"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "two"}]}},
        {"chat_template.jinja": "of the file", "additional_chat_templates/tool_use.jinja": "more"},
        {
            "tokenizer_config.json": {"chat_template": "of the config"},
            "additional_chat_templates/tool_use.jinja": "more",
        },
    ],
)
def test_templates_are_found_where_transformers_finds_them(folder: Path, files: dict[str, object]):
    for name, content in files.items():
        write(folder, name, content)
    assert is_read_as_it_stands(folder)
    assert_as_transformers_has_it(folder, num_texts=1)


@pytest.mark.parametrize("plain", [True, False])
def test_the_template_of_a_processor_is_taken_where_the_tokenizer_has_none(folder: Path, plain: bool):
    config = {} if plain else {"eos_token": "<|new|>"}
    write(folder, "tokenizer_config.json", config)
    write(folder, "chat_template.json", {"chat_template": "of the processor"})
    assert is_read_as_it_stands(folder) == plain
    assert Tokenizer.load(folder).chat_template == "of the processor"
    write(folder, "tokenizer_config.json", {**config, "chat_template": "of the config"})
    assert Tokenizer.load(folder).chat_template == "of the config"


def test_a_template_of_a_processor_that_is_none_is_told(folder: Path):
    write(folder, "chat_template.json", {"chat_template": {"default": "x"}})
    with pytest.raises(CheckpointError, match=r"chat_template\.json: chat_template is a dict, not a string"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("template", [7, {"default": "x"}, ["x"], [{"name": "default"}]])
def test_a_template_that_is_none_is_told(folder: Path, template: Any):
    write(folder, "tokenizer_config.json", {"chat_template": template})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        Tokenizer.load(folder)


def test_a_template_file_that_is_no_text_is_named(folder: Path):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is no text"):
        Tokenizer.load(folder)


def test_the_embedded_tokenizer_loads_at_once_and_without_transformers():
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "start = time.process_time()\n"
        "from hex_llm.text.tokenizer import Tokenizer\n"
        "from hex_llm.text import chat\n"
        f"tokenizer = Tokenizer.load(Path({str(HEX_MINI)!r}))\n"
        "chat.encode_chat(tokenizer, [{'role': 'user', 'content': 'Hi'}])\n"
        "assert not {'transformers', 'jax', 'torch', 'huggingface_hub'} & set(sys.modules)\n"
        "print(time.process_time() - start)\n"
    )
    done = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(3)]
    assert {(run.returncode, run.stderr) for run in done} == {(0, "")}
    assert min(float(run.stdout) for run in done) < 0.5  # the import of jinja and tokenizers too
