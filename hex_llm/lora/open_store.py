"""The adapters that a server's settings let it have."""

from pathlib import Path

from hex_llm.config import Config
from hex_llm.download.fetch import user_cache
from hex_llm.lora.store import Store

_FOLDER = "adapters"


def open_store(config: Config) -> Store:
    """All processes of a server on a machine have the same: what one has downloaded is there for the others."""
    home = Path(config.download_dir) if config.download_dir else user_cache() / "hex_llm"
    return Store(
        home / _FOLDER, config.adapter_prefixes, config.adapter_sources.values(), keep=config.enable_lora_cache
    )
