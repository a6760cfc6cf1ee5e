"""Reads the tokenizer in a folder: tokenizer.json as it stands where that says all, and otherwise by transformers.

transformers takes two seconds to import, which a server that starts would rather not wait for.
"""

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from hex_llm.errors import CheckpointError, ConfigError
from hex_llm.model_files import find_json, impostor

# What a tokenizer's vocabulary may lie in; the first that is there is named when it cannot be read.
_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
# What transformers reads a SentencePiece model with.
_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
_SENTENCEPIECE_START = b"\n"  # the tag of its first piece

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_LISTS = ("extra_special_tokens", "additional_special_tokens")
_NO_TOKEN = ""  # the content of what is no token, and in no tokenizer
# Keys of tokenizer_config.json by which transformers takes another file or changes what it read.
_CHANGING_KEYS = (
    "fast_tokenizer_files",
    "fix_mistral_regex",
    "gguf_file",
    "init_inputs",
    "merges",
    "model_specific_special_tokens",
    "post_processor",
    "split_special_tokens",
    "tokenizer_object",
    "tokenizer_padding",
    "tokenizer_truncation",
    "vocab",
)
# End like the names of tokens, but are switches; transformers leaves them alone beside a tokenizer.json.
_SWITCHES = ("add_bos_token", "add_eos_token")


@dataclass(frozen=True, slots=True)
class TokenizerJson:
    """A tokenizer.json and what lies beside it, under the names that transformers' tokenizers have for it."""

    backend_tokenizer: RustTokenizer
    special_tokens_map: Mapping[str, str]
    chat_template: str | None
    is_fast: Literal[True] = True

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    def _id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def read_tokenizer(folder: Path, mode: Literal["auto", "slow"]) -> Any:
    """A `TokenizerJson` or one of transformers' tokenizers, which Tokenizer asks for the same things."""
    present = [name for name in _VOCABULARY_FILES if (folder / name).is_file()]
    if not present:
        raise CheckpointError(
            f"{folder} holds no tokenizer: there is no tokenizer.json, nor any of {', '.join(_VOCABULARY_FILES[1:])}."
        )
    _check_vocabulary(folder / present[0])
    config = find_json(folder / "tokenizer_config.json") or {}
    special = find_json(folder / "special_tokens_map.json") or {}
    added = find_json(folder / "added_tokens.json") or {}
    # tokenizer.json says all there is to know. The class that tokenizer_config.json names would rebuild a tokenizer
    # from parts of it, which is not always the same one, or ask to run code.
    whole = mode == "auto" and present[0] == "tokenizer.json"
    source = None
    try:
        if whole:
            source = _read_as_it_stands(folder, config, special, added)
        if source is None:
            source = _read_with_transformers(folder, whole)
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder / present[0]} cannot be read as a tokenizer: {reason}") from error
    if mode == "slow" and source.is_fast:
        raise ConfigError(
            f"--tokenizer_mode=slow: transformers has no Python tokenizer for {folder}, only "
            f"{type(source).__name__}, a fast one; leave the flag at auto."
        )
    return source


def _read_with_transformers(folder: Path, whole: bool) -> Any:
    logging.getLogger("transformers").addFilter(_is_not_about_torch)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader = PreTrainedTokenizerFast if whole else AutoTokenizer
    source: Any = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if source.chat_template is None:
        source.chat_template = _processor_template(folder)
    return source


def _read_as_it_stands(
    folder: Path, config: dict[str, Any], special: dict[str, Any], added: dict[str, Any]
) -> TokenizerJson | None:
    """None where transformers would add something to tokenizer.json, or refuse what the other files say."""
    if any(config.get(name) for name in _CHANGING_KEYS):
        return None
    rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    known = {id: _state(token) for id, token in rust.get_added_tokens_decoder().items()}
    if "added_tokens_decoder" in config:  # then the two older files are not looked at
        special, added = {}, {}
    is_special = {state["content"]: state["special"] for state in known.values()}
    named = _named_tokens(config) | {name: value for name, value in special.items() if name not in _TOKEN_LISTS}
    named = {name: _content(value) for name, value in named.items() if value is not None}
    settled = (
        _all_known(config.get("added_tokens_decoder", {}), known)
        and all(known.get(id, {}).get("content") == content for content, id in added.items())
        and special.keys() <= {*_SPECIAL_TOKENS, *_TOKEN_LISTS}
        and all(is_special.get(content, False) for content in named.values())
        and all(content in is_special for content in [*_listed_tokens(config), *_listed_tokens(special)])
    )
    return TokenizerJson(rust, named, _default_template(folder, config)) if settled else None


def _state(token: AddedToken) -> dict[str, Any]:
    return token.__getstate__()  # pyright: ignore[reportReturnType]


def _all_known(tokens: Any, known: Mapping[int, dict[str, Any]]) -> bool:
    if not isinstance(tokens, dict):
        return False
    return all(id.isdecimal() and known.get(int(id)) == token for id, token in tokens.items())


def _named_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens that have names, among which a model may have more than everybody has."""
    named = {
        name: value
        for name, value in config.items()
        if name in _SPECIAL_TOKENS or (name.endswith("_token") and isinstance(value, str | dict))
    }
    for name in _TOKEN_LISTS:
        named |= config[name] if isinstance(config.get(name), dict) else {}
    return {name: value for name, value in named.items() if name not in _SWITCHES}


def _listed_tokens(values: Mapping[str, Any]) -> list[str]:
    """The special tokens that have no names."""
    lists = [values.get(name) or [] for name in _TOKEN_LISTS]
    if not all(isinstance(tokens, list | dict) for tokens in lists):
        return [_NO_TOKEN]
    return [_content(token) for tokens in lists if isinstance(tokens, list) for token in tokens]


def _content(value: Any) -> str:
    """The text of a token, which may be written with its flags."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else _NO_TOKEN


def _default_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template named default: files of their own stand over tokenizer_config.json."""
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / "chat_template.jinja"} | {path.stem: path for path in more}
    present = {name: path for name, path in files.items() if path.is_file()}
    if present:
        return read_template(present["default"]) if "default" in present else None
    path, template = folder / "tokenizer_config.json", config.get("chat_template")
    if template is None:
        return _processor_template(folder)
    if isinstance(template, str):
        return template
    if not isinstance(template, list) or not all(_is_named_template(entry) for entry in template):
        raise CheckpointError(f"{path}: chat_template is neither a string nor a list of templates with names.")
    return {entry["name"]: entry["template"] for entry in template}.get("default")


def _processor_template(folder: Path) -> str | None:
    """The template of a model that also reads pictures, in the file where transformers' processors once had it."""
    path = folder / "chat_template.json"
    template = (find_json(path) or {}).get("chat_template")
    if template is None or isinstance(template, str):
        return template
    raise CheckpointError(f"{path}: chat_template is a {type(template).__name__}, not a string.")


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def read_template(path: Path) -> str:
    """The text of a template's file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is no text in UTF-8.") from None


def _check_vocabulary(path: Path) -> None:
    """Says of a file that transformers cannot read what would help; transformers' own words may mislead."""
    try:
        with path.open("rb") as file:
            head = file.read(100)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if what := impostor(head):
        raise CheckpointError(f"{path} is {what}.")
    wanted = f"{path.parent} has {path.name} but no tokenizer.json, which is needed: put one there"
    elsewhere = ", or name the folder of a model with the same tokenizer in --tokenizer."
    if path.name == "tekken.json" or (path.suffix == ".model" and not head.startswith(_SENTENCEPIECE_START)):
        # Mistral's own format, or tiktoken's, as in Llama 3's folder named original.
        raise CheckpointError(wanted + elsewhere)
    missing = [package for package, module in _SENTENCEPIECE.items() if not _installed(module)]
    if path.suffix == ".model" and missing:
        raise CheckpointError(f"{wanted}, or `pip install {' '.join(missing)}` to have it made from {path.name}.")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
