"""The files that come with a model, of which nothing is trusted: JSON, and which of the others have the weights."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from hex_llm.errors import CheckpointError

WEIGHTS_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file that a model must have."""
    values = find_json(path)
    if values is None:
        raise CheckpointError(f"{path} is missing.")
    return values


def find_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if what := impostor(content[:100]):
        raise CheckpointError(f"{path} is {what}.")
    return decode_json(content, str(path))


def decode_json(content: bytes, source: str, **hooks: Any) -> dict[str, Any]:
    """The JSON object that bytes spell; `source` names them in messages."""
    try:
        values = json.loads(content.decode(), parse_constant=_refuse_constant, **hooks)
    except RecursionError:
        raise CheckpointError(f"{source} is not usable JSON: it is nested too deeply.") from None
    except ValueError as error:  # also text that is not UTF-8, and integers of thousands of digits
        raise CheckpointError(f"{source} is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{source} is not a JSON object.")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def impostor(head: bytes) -> str | None:
    """What a file that starts with `head` really is, if it is one of the things that downloads leave behind."""
    start = head.lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page, not the file itself: the download went to an error or a login page"
    return None


def read_weight_map(path: Path) -> dict[str, str]:
    """The file of each tensor, by an index. Files are of the index's own folder."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or not an object of file names.")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: weight_map names {str(file)[:60]!r}, which is not a safetensors file of this folder."
            )
    return weight_map


def weight_files(names: Iterable[str], source: str, start: str = "model") -> list[str]:
    """The files with the weights where no index tells: those whose names begin so, or else all. Some hold the model
    twice: `consolidated*` is the other copy.
    """
    names = sorted(names)
    found = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if own := [name for name in found if name.startswith(start)]:
        return own
    if found:
        return found
    others = [name for name in names if name.endswith(_OTHER_FORMATS)]
    hint = f"; it has {others[0]}, a format that is not read" if others else ""
    raise CheckpointError(f"{source} holds no *.safetensors file{hint}.")
