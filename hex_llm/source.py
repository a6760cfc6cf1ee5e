"""Where a model's files are, or what is known of a model that has none here."""

from pathlib import Path

from hex_llm.catalog.entry import Entry
from hex_llm.catalog.index import find, near
from hex_llm.config import Config
from hex_llm.errors import ConfigError, DownloadError
from hex_llm.progress import Report, tell_nobody

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "hex-mini"


def model_source(config: Config, report: Report = tell_nobody) -> Path | Entry:
    """The folder with the model's files, downloaded where it names no folder here; of one that is wanted by its name,
    with dummy weights, what is known of it. `report` is told the share that has been downloaded.
    """
    if config.model is None:
        return EMBEDDED_MODEL
    is_dummy = config.load_format == "dummy"
    if is_dummy and not _is_there(config.model) and not _is_address(config.model):
        return _catalogued(config.model)
    return _locate(config, "model", weights=not is_dummy, report=report)


def model_folder(config: Config) -> Path:
    """The folder that tells the model's end tokens and how it is sampled: where it has none, that of its tokenizer.
    Weights are not downloaded for it.
    """
    if config.model is None:
        return EMBEDDED_MODEL
    if config.load_format == "dummy" and isinstance(model_source(config), Entry):
        return tokenizer_folder(config)
    return _locate(config, "model", weights=False)


def tokenizer_folder(config: Config) -> Path:
    """The folder with the tokenizer. The embedded model's does for every model without files: it has fewer tokens."""
    if config.tokenizer is not None:
        return _locate(config, "tokenizer", weights=False)
    if config.load_format == "dummy" and isinstance(model_source(config), Entry):
        return EMBEDDED_MODEL
    return model_folder(config)


def _locate(config: Config, flag: str, *, weights: bool, report: Report = tell_nobody) -> Path:
    """The folder that a flag names, or that has what it names elsewhere."""
    given = getattr(config, flag)
    revision = config.revision if flag == "model" else None
    if folder := local_folder(given, flag):
        if revision is not None:
            raise ConfigError(f"--revision={revision} is for a model of the Hugging Face Hub; {given} is a folder.")
        return folder
    # Only now: what it imports is of no use to those who have a folder.
    from hex_llm.download.fetch import fetch, open_source
    from hex_llm.download.reference import OnHub, parse_reference, with_revision
    from hex_llm.download.wanted import MODEL, TEXT

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
    source = open_source(reference, Path(config.download_dir) if config.download_dir else None)
    try:
        return fetch(source, MODEL if weights else TEXT, timeout_s=config.download_timeout_s, report=report)
    except DownloadError as error:
        if error.status is None:
            raise
        raise DownloadError(f"{error} Nor is there a folder {given} on this machine.", status=error.status) from None


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


def _is_address(name: str) -> bool:
    """Whether it says where the model is, rather than what it is called."""
    return name.startswith("gs://") or "@" in name


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
