"""Which model a server serves, and where its tokenizer may be found on this machine."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from hex_llm.bench.http_client import HttpClient, HttpError
from hex_llm.errors import ConfigError
from hex_llm.source import EMBEDDED_MODEL

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


async def list_models(client: HttpClient) -> list[dict[str, Any]]:
    """The models that /v1/models lists; none where the server has no such list."""
    async with client.request("GET", "/v1/models") as response:
        content = await response.read_all()
    if response.status == 404:
        return []
    if response.status != 200:
        raise HttpError(f"It answers with status {response.status}: {content[:300].decode(errors='replace')}")
    try:
        models = orjson.loads(content)["data"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []
    return [model for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)]


def tokenizer_folder(given: str | None, names: Iterable[str | None]) -> Path | None:
    """The folder given; or the first of the names that is a folder with a tokenizer, or is the embedded model's."""
    if given is not None:
        if not _holds_a_tokenizer(Path(given)):
            raise ConfigError(f"--tokenizer={given} is not a folder with a tokenizer.")
        return Path(given)
    for name in filter(None, names):
        if _holds_a_tokenizer(Path(name)):
            return Path(name)
        if name == EMBEDDED_MODEL.name:
            return EMBEDDED_MODEL
    return None


def _holds_a_tokenizer(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in _FILES)
    except OSError:  # such as a name too long for any file
        return False
