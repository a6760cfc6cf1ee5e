"""Where a model's files are, or what is known of a model that has none here."""

from pathlib import Path

from hex_llm.catalog.entry import Entry
from hex_llm.catalog.index import find, near
from hex_llm.config import Config
from hex_llm.errors import ConfigError

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "hex-mini"


def model_source(config: Config) -> Path | Entry:
    """The folder with the model's files; of one that is wanted by its name, with dummy weights, what is known of it."""
    if config.model is None:
        return EMBEDDED_MODEL
    if config.load_format == "dummy" and not _is_there(config.model):
        return _catalogued(config.model)
    return locate(config.model)


def model_folder(config: Config) -> Path:
    """The folder that tells the model's end tokens and how it is sampled: where it has none, that of its tokenizer."""
    source = model_source(config)
    return source if isinstance(source, Path) else tokenizer_folder(config)


def tokenizer_folder(config: Config) -> Path:
    """The folder with the tokenizer. The embedded model's does for every model without files: it has fewer tokens."""
    if config.tokenizer is not None:
        return locate(config.tokenizer, flag="tokenizer")
    source = model_source(config)
    return source if isinstance(source, Path) else EMBEDDED_MODEL


def locate(given: str, flag: str = "model") -> Path:
    """The folder that a flag names, in Hugging Face's layout."""
    if not given:
        raise ConfigError(f"--{flag} is empty; it must name a folder in Hugging Face layout.")
    folder = Path(given)
    try:
        if folder.is_dir():
            return folder
        if folder.exists():
            raise ConfigError(f"--{flag}={given} is a file; it must be a folder in Hugging Face layout.")
    except OSError as error:  # such as a name too long for any file
        raise ConfigError(f"--{flag}={given[:60]} cannot be looked up: {error.strerror}.") from None
    hint = " With --load_format=dummy it can be run by this name, on random weights." if find(given) else ""
    raise ConfigError(
        f"--{flag}={given} is not a folder on this machine, and this version reads models from folders only; "
        f"`hf download` of huggingface_hub, or gcloud storage, makes one.{hint if flag == 'model' else ''}"
    )


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
