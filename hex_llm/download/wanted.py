"""Which of a source's files are downloaded: those that are read here, and no code, no pickle, no other copy."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hex_llm.errors import CheckpointError
from hex_llm.model_files import WEIGHTS_INDEX, read_weight_map, weight_files

_MODEL_FILES = ("config.json", "generation_config.json", "quant*_config.json", "hf_quant_config.json")
_TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """`required` is a file without which the rest is of no use. `weights` are chosen once the other files are there:
    their index is one of those.
    """

    patterns: tuple[str, ...]
    required: str | None = None
    weights: bool = False

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Those among a source's files that are wanted in any case. What lies in a folder below is another's."""
        own = (name for name in names if "/" not in name)
        return sorted(name for name in own if any(fnmatchcase(name, pattern) for pattern in self.patterns))

    def chosen_weights(self, names: Iterable[str], folder: Path, source: str) -> list[str]:
        """The files with the weights; `folder` has the index, where there is one."""
        if not self.weights:
            return []
        names, index = set(names), folder / WEIGHTS_INDEX
        chosen = sorted({*read_weight_map(index).values()}) if WEIGHTS_INDEX in names else weight_files(names, source)
        if missing := [name for name in chosen if name not in names]:
            raise CheckpointError(f"{source} has no {missing[0]}, and its {WEIGHTS_INDEX} names it.")
        return chosen

    def check(self, names: Iterable[str], source: str) -> None:
        names = set(names)
        if self.required is not None and self.required not in names:
            raise CheckpointError(f"{source} has no {self.required}.")
        if self.weights and WEIGHTS_INDEX not in names:
            weight_files(names, source)

    def lacking(self, folder: Path) -> str | None:
        """What makes a folder of no use, where something does."""
        names = [path.name for path in folder.iterdir() if path.exists()]
        try:
            self.check(names, str(folder))
            self.chosen_weights(names, folder, str(folder))
        except CheckpointError as error:
            return str(error)
        return None


# What describes a model, and turns text to tokens.
TEXT = Wanted((*_MODEL_FILES, *_TOKENIZER_FILES))
MODEL = Wanted((*TEXT.patterns, WEIGHTS_INDEX), required="config.json", weights=True)
