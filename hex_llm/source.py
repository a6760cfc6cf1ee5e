"""Where a model's files are, or what is known of a model that has none here."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from hex_llm.catalog.entry import Entry
from hex_llm.catalog.index import find, near
from hex_llm.config import Config
from hex_llm.errors import ConfigError, DownloadError, NoSpace
from hex_llm.progress import Report, tell_nobody

if TYPE_CHECKING:
    from hex_llm.download.shards import Shards
    from hex_llm.download.source import Source
    from hex_llm.download.wanted import Wanted

logger = logging.getLogger(__name__)

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "hex-mini"


def model_source(config: Config, report: Report = tell_nobody) -> "Path | Shards | Entry":
    """The folder with the model's files, downloaded where they are elsewhere; its shards, where the disk has no room
    for them; of a model that is wanted by its name, with dummy weights, what is known of it. `report` is told the share
    that has been downloaded.
    """
    if config.model is None:
        return EMBEDDED_MODEL
    if _is_catalogued(config):
        return _catalogued(config.model)
    is_dummy = config.load_format == "dummy"
    found = _find(config, "model")
    if isinstance(found, Path):
        return found
    if not str(found).startswith("gs://"):  # which may be a slip, where it was to be a folder
        logger.info("There is no folder %s here: it is asked of the Hugging Face Hub.", found)
    # Only now: what it imports is of no use to those who have a folder.
    from hex_llm.download.shards import open_shards
    from hex_llm.download.wanted import MODEL, TEXT

    try:
        return _fetch(found, TEXT if is_dummy else MODEL, config, report)
    except NoSpace as error:
        if is_dummy:
            raise
        logger.warning("%s Until there is room, each start streams the weights, file by file, to the devices.", error)
    return open_shards(found, timeout_s=config.download_timeout_s, report=report)


def model_folder(config: Config) -> Path:
    """The folder that tells the model's end tokens and how it is sampled: where it has none, that of its tokenizer.
    Weights are not downloaded for it.
    """
    if config.model is None:
        return EMBEDDED_MODEL
    if _is_catalogued(config):
        return tokenizer_folder(config)
    return _described(config, "model")


def tokenizer_folder(config: Config) -> Path:
    """The folder with the tokenizer. The embedded model's does for every model without files: it has fewer tokens."""
    if config.tokenizer is not None:
        return _described(config, "tokenizer")
    if config.model is None or _is_catalogued(config):
        return EMBEDDED_MODEL
    return _described(config, "model")


def text_folders(config: Config) -> tuple[Path, Path]:
    """That of the tokenizer and that of the model, which is asked for once where they are one."""
    tokenizer = tokenizer_folder(config)
    return tokenizer, tokenizer if config.tokenizer is None else model_folder(config)


def _described(config: Config, flag: str) -> Path:
    """The folder that a flag names, or one with all but the weights of what it names elsewhere."""
    found = _find(config, flag)
    if isinstance(found, Path):
        return found
    from hex_llm.download.wanted import TEXT

    return _fetch(found, TEXT, config, tell_nobody)


def _fetch(source: "Source", wanted: "Wanted", config: Config, report: Report) -> Path:
    from hex_llm.download.fetch import fetch

    try:
        return fetch(source, wanted, timeout_s=config.download_timeout_s, report=report)
    except DownloadError as error:
        if error.status is None or str(source).startswith("gs://"):
            raise
        raise DownloadError(f"{error} Nor is there a folder {source} on this machine.", status=error.status) from None


def _find(config: Config, flag: str) -> "Path | Source":
    """The folder that a flag names, or where else it is."""
    given = getattr(config, flag)
    revision = config.revision if flag == "model" else None
    if folder := local_folder(given, flag):
        if revision is not None:
            raise ConfigError(f"--revision={revision} is for a model of the Hugging Face Hub; {given} is a folder.")
        return folder
    from hex_llm.download.fetch import open_source
    from hex_llm.download.reference import OnHub, parse_reference, with_revision

    reference = parse_reference(given)
    if reference is None:
        raise ConfigError(
            f"--{flag}={given[:200]} is neither a folder on this machine, nor can it be a model of the Hugging Face Hub"
            " (OWNER/NAME or OWNER/NAME@REVISION) or a place in Cloud Storage (gs://BUCKET/PATH)."
        )
    if revision is not None:
        if not isinstance(reference, OnHub):
            raise ConfigError(f"--revision={revision} is for a model of the Hugging Face Hub; {given} is not there.")
        reference = with_revision(reference, revision)
    return open_source(reference, Path(config.download_dir) if config.download_dir else None)


def local_folder(given: str, flag: str) -> Path | None:
    """The folder of this machine that a flag names, in Hugging Face's layout."""
    folder = Path(given)
    try:
        if folder.is_dir():
            return folder
        if folder.exists():
            raise ConfigError(f"--{flag}={given} is a file; it must be a folder in Hugging Face layout.")
    except OSError as error:  # such as a name too long for any file
        raise ConfigError(f"--{flag}={given[:60]} cannot be looked up: {error.strerror}.") from None
    return None


def _is_catalogued(config: Config) -> bool:
    """Whether the model is one of the catalog's, with dummy weights. An address is of one that is elsewhere."""
    name = config.model or ""
    is_address = name.startswith("gs://") or "@" in name
    return config.load_format == "dummy" and config.model is not None and not is_address and not _is_there(name)


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:
        return False


def _catalogued(name: str) -> Entry:
    if entry := find(name):
        return entry
    meant = " or ".join(near(name))
    hint = f"did you mean {meant}?" if meant else "`hex-llm models` lists it."
    raise ConfigError(f"--model={name[:200]} is neither a folder on this machine nor a model of the catalog; {hint}")
