"""The tokenizer of a model: text to token ids and back, its special tokens, and the sampling it was published with."""

import enum
import functools
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from hex_llm.errors import CheckpointError, RequestError
from hex_llm.model_files import find_json
from hex_llm.text.tokenizer_files import read_tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_logger = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Joining(enum.Enum):
    """How the texts of tokens make one text, as far as text that is already out can depend on what follows."""

    BYTES = enum.auto()  # every token is some bytes, the text is their UTF-8
    PIECES = enum.auto()  # every token has its text, but for the first one and for runs of byte tokens
    WINDOW = enum.auto()  # unknown: looked at through a window of the last tokens


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What generation_config.json says about sampling; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those it says something about, by the names of sampling parameters."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


class Tokenizer:
    """A fast tokenizer (Rust) or a slow one of transformers (Python).

    `decode` never cleans up spaces afterwards ("word ." to "word."), whatever tokenizer_config.json asks for: that
    rewrites text which a stream has already sent. Ids without a token decode to nothing.
    """

    def __init__(
        self,
        source: Any,  # TokenizerJson or transformers.PreTrainedTokenizerBase, which load() does without if it can
        *,
        eos_ids: Iterable[int] = (),
        defaults: GenerationDefaults | None = None,
    ):
        self._source = source
        self._rust: Any = source.backend_tokenizer if source.is_fast else None
        if self._rust is not None:
            # A tokenizer.json may carry the truncation it was trained with: nothing is cut without a word.
            self._rust.no_truncation()
            self._rust.no_padding()
        vocabulary: dict[str, int] = source.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bos_id: int | None = source.bos_token_id
        self.eos_ids = frozenset(eos_ids) | {id for id in (source.eos_token_id,) if id is not None}
        self.special_tokens: Mapping[str, str] = source.special_tokens_map
        """Those that have names, such as bos_token: what templates call them."""
        self.special_ids = self._skipped_ids()
        self.defaults = defaults or GenerationDefaults()
        self.joining = Joining.WINDOW if self._rust is None else _joining(self._rust.decoder)
        self._byte_tokens = _byte_tokens(vocabulary) if self._falls_back_to_bytes() else {}
        self._pieces: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self._spacer: tuple[int, int] | None = None

    @classmethod
    def load(
        cls, folder: Path, *, mode: Literal["auto", "slow"] = "auto", model_folder: Path | None = None
    ) -> "Tokenizer":
        """The tokenizer in `folder`; end tokens and sampling defaults are those of the model in `model_folder`."""
        model_folder = model_folder or folder
        config_path, generation_path = model_folder / "config.json", model_folder / "generation_config.json"
        config, generation = find_json(config_path) or {}, find_json(generation_path) or {}
        source = read_tokenizer(folder, mode)
        text_config = config.get("text_config") or {}
        if not isinstance(text_config, dict):
            raise CheckpointError(f"{config_path}: text_config is a {type(text_config).__name__}, not an object.")
        eos_ids = [
            *_token_ids(config, "eos_token_id", config_path),
            *_token_ids(text_config, "eos_token_id", config_path),
            *_token_ids(generation, "eos_token_id", generation_path),
        ]
        return cls(source, eos_ids=eos_ids, defaults=_generation_defaults(generation, generation_path))

    @property
    def chat_template(self) -> str | None:
        """The model's template; of several, the one named default."""
        template = self._source.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise no_character(error) from None
        if self._rust is not None:  # past transformers, which sets truncation on each call: not safe in threads
            return self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        return list(self._source.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self._rust is not None:
            return self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens)
        known = [id for id in ids if id < self.vocab_size]
        return self._source.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def encode_bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Every word as the tokens it is at the start of a text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            if not word.strip():
                raise RequestError(f"bad_words holds {word!r}, which is no word.", param="bad_words")
            for text in (word.lstrip(), " " + word.lstrip()):
                sequences[tuple(self.encode(text, add_special_tokens=False))] = None
        return tuple(sequences)

    @functools.cached_property
    def max_token_chars(self) -> int:
        """The most characters of a text that a token stands for: a longer text needs more tokens than one.

        Not counted are spaces that some tokens swallow and unknown words of any length that become one token.
        """
        vocabulary: dict[str, int] = self._source.get_vocab()
        if self.joining is not Joining.BYTES:
            return max(map(len, vocabulary), default=1)
        added = self._rust.get_added_tokens_decoder()
        return max(len(name) if id in added else _num_characters(name) for name, id in vocabulary.items())

    def check_embedding(self, num_rows: int) -> None:
        """Refuses a tokenizer with ordinary tokens that the model has no embedding for.

        Added ones may lack it: Gemma 3 1B shares its tokenizer with larger models, which read pictures. A prompt that
        holds one is refused for it.
        """
        added = self._source.get_added_vocab() if self._rust is None else self._added_names()
        missing = {name: id for name, id in self._source.get_vocab().items() if id >= num_rows}
        if missing.keys() - added:
            raise CheckpointError(
                f"The tokenizer's highest token id is {self.vocab_size - 1}, but the model embeds {num_rows} tokens."
            )
        if missing:
            some = ", ".join(f"{name} ({id})" for name, id in sorted(missing.items(), key=lambda item: item[1])[:5])
            _logger.warning(
                "The model embeds %d tokens, not %d of the tokenizer's: %s. Prompts that hold them are refused.",
                num_rows,
                len(missing),
                some + (", ..." if len(missing) > 5 else ""),
            )

    def token_name(self, id: int) -> str | None:
        """The token as the vocabulary writes it; None where the id has no token."""
        if self._rust is not None:
            return self._rust.id_to_token(id)
        return self._source.convert_ids_to_tokens(id) if id < self.vocab_size else None

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for in the middle of a text, which need not be whole characters."""
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes[id] = self._spell(id)
        return found

    def byte_token(self, id: int) -> int | None:
        """The value of a token like <0x0A>, which stands for one byte of a character that has no token."""
        return self._byte_tokens.get(id)

    def piece(self, id: int) -> str:
        """The text that a token adds after another one."""
        found = self._pieces.get(id)
        if found is None:
            found = self._pieces[id] = self.decode_after_spacer([id])
        return found

    @property
    def spacer(self) -> int:
        """An ordinary token: what is decoded after it is not at the start of a text."""
        return self._find_spacer()[0]

    def decode_after_spacer(self, ids: Sequence[int]) -> str:
        spacer, length = self._find_spacer()
        return self.decode([spacer, *ids], skip_special_tokens=False)[length:]

    def _find_spacer(self) -> tuple[int, int]:
        if self._spacer is None:
            for id in range(self.vocab_size):
                text = self.decode([id], skip_special_tokens=False)
                ordinary = text.isprintable() and text == text.strip() != "" and REPLACEMENT not in text
                if ordinary and id not in self.special_ids and self.byte_token(id) is None:
                    self._spacer = id, len(text)
                    break
            else:
                raise CheckpointError("The tokenizer has no token that is a printable text.")
        return self._spacer

    def _spell(self, id: int) -> bytes:
        name = self.token_name(id)
        if name is None:
            return b""
        if self.joining is Joining.BYTES:
            # As the byte-level decoder has it: one character of its alphabet per byte, or else the text itself.
            values = [_BYTE_OF_CHARACTER.get(character) for character in name]
            return name.encode() if None in values else bytes(value for value in values if value is not None)
        byte = self.byte_token(id)
        return self.piece(id).encode() if byte is None else bytes([byte])

    def _falls_back_to_bytes(self) -> bool:
        return self._rust is not None and b'"ByteFallback"' in _state(self._rust.decoder)

    def _added_names(self) -> set[str]:
        return {token.content for token in self._rust.get_added_tokens_decoder().values()}

    def _skipped_ids(self) -> frozenset[int]:
        if self._rust is None:
            return frozenset(self._source.all_special_ids)
        added = self._rust.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)


def no_character(error: UnicodeEncodeError, *, param: str | None = None) -> RequestError:
    """What is said of a text that cannot be UTF-8."""
    return RequestError(
        f"The text holds U+{ord(error.object[error.start]):04X} at character {error.start}, half of a surrogate pair, "
        "which is not a character.",
        param=param,
    )


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones stand for themselves."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
# The characters of the alphabet that stand for a byte inside a character of UTF-8.
_INNER_BYTES = frozenset(character for character, byte in _BYTE_OF_CHARACTER.items() if 0x80 <= byte < 0xC0)


def _num_characters(name: str) -> int:
    """How many characters begin in the bytes that a name spells, each of which begins in one token only."""
    return len(name) - sum(character in _INNER_BYTES for character in name)


def _byte_tokens(vocabulary: dict[str, int]) -> dict[int, int]:
    return {id: int(match[1], 16) for name, id in vocabulary.items() if (match := _BYTE_TOKEN.fullmatch(name))}


def _state(decoder: Any) -> bytes:
    return b"null" if decoder is None else decoder.__getstate__()


def _joining(decoder: Any) -> Joining:
    """Whether a decoder of the tokenizers library is one whose tokens can be put in text one by one."""
    state = json.loads(_state(decoder))
    if state is None:
        return Joining.PIECES
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
        return Joining.BYTES
    # A Fuse makes one text of all tokens: only taking from its start leaves what follows as it is.
    fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    single = {"Replace", "ByteFallback", "Strip", "Metaspace", "WordPiece"}
    whole = all(step["type"] == "Fuse" or (step["type"] == "Strip" and not step["stop"]) for step in steps[fused:])
    return Joining.PIECES if whole and single.issuperset(kinds[:fused]) else Joining.WINDOW


def _token_ids(values: dict[str, Any], name: str, path: Path) -> list[int]:
    value = values.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int and id >= 0 for id in ids):
        raise CheckpointError(f"{path}: {name} is {value!r}, not a token id or a list of token ids.")
    return ids


def _generation_defaults(values: dict[str, Any], path: Path) -> GenerationDefaults:
    def number(name: str, kinds: Collection[type], low: float, high: float = float("inf")) -> Any:
        value = values.get(name)
        if value is None or (type(value) in kinds and low <= value <= high):
            return value
        raise CheckpointError(f"{path}: {name} is {value!r}, not a number from {low} to {high}.")

    return GenerationDefaults(
        temperature=number("temperature", (int, float), 0),
        top_p=number("top_p", (int, float), 0, 1),
        top_k=number("top_k", (int,), -1),
        repetition_penalty=number("repetition_penalty", (int, float), 0),
    )
