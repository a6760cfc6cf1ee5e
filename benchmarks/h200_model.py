"""The folder of a model without weights: its config.json, and a tokenizer in which every token is a word.

With tokens that have no text of their own, a stream would have fewer events than tokens, and the time between two
of them would say nothing.
"""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_LETTERS = string.ascii_lowercase
_SPACE = "Ġ"  # as byte-level vocabularies write it


def write_model(folder: Path, config: Mapping[str, Any]) -> Path:
    """Writes it unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        write_tokenizer(folder, config["vocab_size"])
        (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Joins tokens byte by byte, as Llama 3's does. All have a space before their word but the token 0, which any
    other word becomes.
    """
    vocabulary = {word(0): 0} | {_SPACE + word(number): number for number in range(1, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}\n")


def word(number: int) -> str:
    """Four letters, other ones for every number."""
    letters = ""
    for _ in range(4):
        number, place = divmod(number, len(_LETTERS))
        letters = _LETTERS[place] + letters
    assert not number, f"there are {len(_LETTERS) ** 4} words"
    return letters
