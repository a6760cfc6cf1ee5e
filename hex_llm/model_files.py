"""JSON files that come with a model, of which nothing is trusted."""

import json
from pathlib import Path
from typing import Any, NoReturn

from hex_llm.errors import CheckpointError


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
