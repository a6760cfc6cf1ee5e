"""What a folder of tokenizer files gives, and what is said of a bad one."""

import importlib.util
import json
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from built_tokenizers import (
    TEXT,
    PythonTokenizer,
    byte_level,
    byte_level_with_added_tokens,
    llama2,
    metaspace,
    python,
    train_byte_level,
    unigram,
    wrap,
)
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hex_llm.errors import CheckpointError, ConfigError, RequestError
from hex_llm.text.tokenizer import GenerationDefaults, Tokenizer


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = train_byte_level(300, ["<s>", "</s>", "<|eot|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    write(tmp_path, "config.json", {"model_type": "llama", "eos_token_id": [1, 2]})
    return tmp_path


def test_text_survives_encoding_and_decoding(folder: Path):
    tokenizer = Tokenizer.load(folder)
    text = "Hello, 你好 🚀\n  end"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(folder).encode(text)
    assert tokenizer.vocab_size == 300


def test_special_tokens_are_added_and_skipped_as_asked(folder: Path):
    source = AutoTokenizer.from_pretrained(folder, add_bos_token=True)
    tokenizer = Tokenizer(source)
    ids = tokenizer.encode("a")
    assert ids == [tokenizer.bos_id, *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a"
    assert tokenizer.special_ids == {0, 1, 2}


def test_loading_opens_no_connection(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    Tokenizer.load(folder)


def test_code_beside_a_tokenizer_is_never_run(folder: Path):
    write(folder, "trap.py", f"open({str(folder / 'ran')!r}, 'w')\nclass Trap: pass")
    write(
        folder, "tokenizer_config.json", {"tokenizer_class": "Trap", "auto_map": {"AutoTokenizer": ["trap.Trap", None]}}
    )
    assert Tokenizer.load(folder).encode("a")
    (folder / "tokenizer.json").unlink()
    write(folder, "vocab.json", {})
    with pytest.raises(CheckpointError, match=r"vocab\.json"):
        Tokenizer.load(folder)
    assert not (folder / "ran").exists()


def test_end_tokens_are_those_of_all_three_files(folder: Path):
    assert Tokenizer.load(folder).eos_ids == {1, 2}
    write(folder, "generation_config.json", {"eos_token_id": 7})
    assert Tokenizer.load(folder).eos_ids == {1, 2, 7}
    write(folder, "config.json", {"model_type": "llama4", "text_config": {"eos_token_id": 9}})
    assert Tokenizer.load(folder).eos_ids == {1, 7, 9}
    write(folder, "config.json", {"model_type": "llama", "eos_token_id": None})
    write(folder, "generation_config.json", {})
    assert Tokenizer.load(folder).eos_ids == {1}  # the tokenizer's own


def test_end_tokens_come_from_the_model_where_the_tokenizer_lies_elsewhere(folder: Path, tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    write(model, "config.json", {"eos_token_id": 5})
    assert Tokenizer.load(folder, model_folder=model).eos_ids == {1, 5}


def test_sampling_defaults_are_those_of_generation_config(folder: Path):
    assert Tokenizer.load(folder).defaults == GenerationDefaults()
    write(folder, "generation_config.json", {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True})
    assert Tokenizer.load(folder).defaults == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", '{"version": "1.0", "trunc'),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", "{not json"),
        ("tokenizer_config.json", "[1]"),
        ("config.json", "{"),
        ("config.json", '{"a": ' * 100_000),
        ("config.json", '{"text_config": [1]}'),
        ("generation_config.json", '{"temperature": NaN}'),
        ("config.json", '{"eos_token_id": "two"}'),
        ("config.json", '{"eos_token_id": [1, true]}'),
        ("generation_config.json", '{"eos_token_id": -1}'),
        ("generation_config.json", '{"top_p": 1.5}'),
        ("generation_config.json", '{"temperature": "hot"}'),
        ("generation_config.json", "\xff"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, content: str):
    write(folder, name, content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as raised:
        Tokenizer.load(folder)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_pointer_in_the_place_of_a_file_is_told(folder: Path, name: str):
    write(folder, name, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        Tokenizer.load(folder)


def test_a_sentencepiece_model_alone_asks_for_tokenizer_json_or_the_packages(folder: Path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sentencepiece" else find_spec(name))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, which is needed.*pip install sentencepiece"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("name", "content"), [("tekken.json", '{"config": {}, "vocab": []}'), ("tokenizer.model", "IQ== 0\nIg== 1\n")]
)
@pytest.mark.parametrize("named", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_formats_that_only_their_makers_read_ask_for_tokenizer_json(folder: Path, name: str, content: str, named: str):
    (folder / "tokenizer.json").unlink()
    write(folder, name, content)
    write(folder, "tokenizer_config.json", {"tokenizer_class": named})  # of which transformers makes an empty one
    with pytest.raises(CheckpointError, match=rf"has {name} but no tokenizer\.json.*--tokenizer"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_a_missing_tokenizer_is_named_even_where_transformers_would_make_an_empty_one(folder: Path, named: str):
    (folder / "tokenizer.json").unlink()
    write(folder, "tokenizer_config.json", {"tokenizer_class": named})
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.load(folder)


def test_tokenizer_json_stands_over_the_class_that_the_config_names(folder: Path):
    write(folder, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"})
    assert Tokenizer.load(folder).decode(Tokenizer.load(folder).encode("a b\nc")) == "a b\nc"


def test_a_truncation_in_the_file_cuts_nothing(folder: Path):
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    write(folder, "tokenizer.json", saved)
    assert len(Tokenizer.load(folder).encode("~" * 50)) == 50


def test_slow_is_refused_where_there_is_only_a_fast_tokenizer(folder: Path):
    with pytest.raises(ConfigError, match="tokenizer_mode=slow"):
        Tokenizer.load(folder, mode="slow")


def test_a_slow_tokenizer_does_all_that_a_fast_one_does():
    tokenizer = python()
    ids = tokenizer.encode("the é ~ end")
    assert tokenizer.decode([*ids, *PythonTokenizer().all_special_ids, 10_000]) == "the é ~ end"
    assert tokenizer.vocab_size == len(PythonTokenizer())
    assert tokenizer.token_bytes(tokenizer.encode("b")[0]) == b"b"
    assert tokenizer.encode_bad_words(["b"])


def test_a_vocabulary_larger_than_the_embedding_is_refused():
    tokenizer = byte_level()
    tokenizer.check_embedding(tokenizer.vocab_size)
    with pytest.raises(
        CheckpointError, match=f"id is {tokenizer.vocab_size - 1}, .* embeds {tokenizer.vocab_size - 1} "
    ):
        tokenizer.check_embedding(tokenizer.vocab_size - 1)


def test_an_added_token_without_embedding_is_told_of(caplog: pytest.LogCaptureFixture):
    rust = train_byte_level(300, ["</s>"])
    rust.add_special_tokens(["<image_soft_token>"])
    tokenizer = wrap(rust)
    tokenizer.check_embedding(301)
    assert not caplog.records
    tokenizer.check_embedding(300)
    assert "embeds 300 tokens, not 1 of the tokenizer's: <image_soft_token> (300). Prompts" in caplog.text
    with pytest.raises(CheckpointError, match="id is 300, but the model embeds 299 tokens"):
        tokenizer.check_embedding(299)


def test_bad_words_are_encoded_with_and_without_a_space():
    tokenizer = byte_level()
    words = tokenizer.encode_bad_words(["the", " end"])
    assert {tokenizer.decode(word) for word in words} == {"the", " the", "end", " end"}
    with pytest.raises(RequestError, match="bad_words"):
        tokenizer.encode_bad_words(["ok", " "])


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(RequestError, match=r"U\+D83D at character 3"):
        byte_level().encode("abc\ud83d")


def test_single_tokens_read_as_in_the_middle_of_a_text():
    plain, fallback, gemma = byte_level(), llama2(), unigram()
    rocket = plain.encode("🧩")
    assert b"".join(plain.token_bytes(id) for id in rocket) == "🧩".encode()
    names = {fallback.token_name(id): id for id in range(fallback.vocab_size)}
    assert fallback.token_bytes(names["▁the"]) == b" the"
    assert fallback.token_bytes(names["<0x0A>"]) == b"\n"
    assert fallback.token_bytes(names["</s>"]) == b"</s>"
    assert gemma.token_bytes(gemma.vocab_size + 1) == b""


@pytest.mark.parametrize("build", [byte_level, byte_level_with_added_tokens, llama2, unigram, metaspace])
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(build: Callable[[], Tokenizer]):
    tokenizer, choose = build(), random.Random(0)
    for _ in range(300):
        text = "".join(choose.choices(TEXT, k=choose.randrange(60)))
        assert len(text) <= len(tokenizer.encode(text, add_special_tokens=False)) * tokenizer.max_token_chars
    assert tokenizer.max_token_chars <= 12


def test_the_characters_of_a_token_of_bytes_are_counted_and_not_the_bytes():
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.train_from_iterator(["你好"] * 9, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    assert len(wrap(tokenizer).encode("你好")) == 1
    assert wrap(tokenizer).max_token_chars == 2
    tokenizer.add_tokens(["¡¡¡"])  # written as it is, and not as bytes
    assert wrap(tokenizer).max_token_chars == 3


def test_loading_is_silent_and_imports_neither_transformers_nor_jax(folder: Path):
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hex_llm.text import chat, client, detokenizer, process, tokenizer\n"
        f"tokenizer.Tokenizer.load(Path({str(folder)!r}))\n"
        "assert not {'jax', 'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
