"""Where a model's files are."""

from pathlib import Path

from hex_llm.config import Config
from hex_llm.errors import ConfigError

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "hex-mini"


def model_folder(config: Config) -> Path:
    return locate(config.model) if config.model else EMBEDDED_MODEL


def tokenizer_folder(config: Config) -> Path:
    return locate(config.tokenizer) if config.tokenizer else model_folder(config)


def locate(model: str) -> Path:
    """The folder that holds the model, in Hugging Face's layout."""
    if not model:
        raise ConfigError("--model is empty; it must name a folder in Hugging Face layout.")
    folder = Path(model)
    try:
        if folder.is_dir():
            return folder
        if folder.exists():
            raise ConfigError(f"--model={model} is a file; it must be a folder in Hugging Face layout.")
    except OSError as error:  # such as a name too long for any file
        raise ConfigError(f"--model={model[:60]} cannot be looked up: {error.strerror}.") from None
    raise ConfigError(
        f"--model={model} is not a folder on this machine, and this version reads models from folders only; "
        "`hf download` of huggingface_hub, or gcloud storage, makes one."
    )
