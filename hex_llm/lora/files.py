"""The files of an adapter in PEFT's layout: which of a folder's they are, how many, and how large they may be."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hex_llm.errors import AdapterError, CheckpointError
from hex_llm.model_files import weight_files
from hex_llm.progress import size

CONFIG = "adapter_config.json"
MOST_FILES = 16
MOST_BYTES = 2 * 2**30
MOST_CONFIG_BYTES = 2**20

_WEIGHTS = "adapter_model"  # what their names begin with
_NAME = re.compile(r"[A-Za-z0-9._=-]{1,200}")
_SHARD = re.compile(r"(.+-)\d{5}(-of-(\d{5})\.safetensors)")


def chosen(sizes: Mapping[str, int], source: str) -> list[str]:
    """Those that are read, the config first, of the files that there are, by name. Known before one is downloaded."""
    if CONFIG not in sizes:
        raise AdapterError(f"{source} has no {CONFIG}.")
    try:
        weights = weight_files(sizes, source, _WEIGHTS)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    names = [CONFIG, *weights]
    total = sum(sizes[name] for name in names)
    if len(names) > MOST_FILES:
        raise AdapterError(f"{source} has {len(names)} files; an adapter may have {MOST_FILES}.")
    if total > MOST_BYTES:
        raise AdapterError(f"{source} has {size(total)}; an adapter may have {size(MOST_BYTES)}.")
    if odd := [name for name in names if not _NAME.fullmatch(name)]:
        raise AdapterError(f"{source} has the file {odd[0][:60]!a}; names have letters, digits and ._=- only.")
    if sizes[CONFIG] > MOST_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG} of {source} has {size(sizes[CONFIG])}; it may have {size(MOST_CONFIG_BYTES)}.")
    _check_shards(weights, source)
    return names


def _check_shards(weights: list[str], source: str) -> None:
    """No index is read, but their names tell how many there are."""
    for match in filter(None, map(_SHARD.fullmatch, weights)):
        start, end, count = match.groups()
        present = sum(name.startswith(start) and name.endswith(end) for name in weights)
        if present != int(count):
            raise AdapterError(f"{source} has {present} of the {int(count)} files that {match[0]} is one of.")


def in_folder(folder: Path) -> dict[str, os.stat_result]:
    """Those of a folder that are read, which no link may lead out of."""
    try:
        with os.scandir(folder) as entries:
            stats = {entry.name: entry.stat() for entry in entries if entry.is_file()}
        names = chosen({name: stat.st_size for name, stat in stats.items()}, folder.name)
        home = folder.resolve(strict=True)
        away = [name for name in names if not (folder / name).resolve(strict=True).is_relative_to(home)]
    except OSError as error:
        raise AdapterError(f"{folder.name} cannot be read: {error.strerror}.") from None
    if away:
        raise AdapterError(f"{away[0]} of {folder.name} is a link that leads out of the folder.")
    return {name: stats[name] for name in names}
