"""The folder in which JAX keeps what it has compiled, for the next start."""

import logging
import os
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from hex_llm.errors import ConfigError

logger = logging.getLogger(__name__)


def use_cache(cache: str | None, folder: Path | None) -> None:
    """Has JAX keep what it compiles in a folder or at an address (gs://...), or not at all.

    `folder` is the same as `cache` where that is a folder.
    """
    compilation_cache.reset_cache()  # or else JAX stays with the folder it began with
    jax.config.update("jax_enable_compilation_cache", cache is not None)
    if cache is None:
        return
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if folder is not None:
        _prepare(folder)


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Where the disk was full JAX leaves empty files, which it can neither read nor ever writes again.
        for path in folder.glob("*-cache"):
            if not path.stat().st_size:
                path.unlink()
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"--compilation_cache_dir={folder} is not a folder.") from error
    except OSError:
        pass  # a folder that can only be read is of use too
    if not os.access(folder, os.W_OK):
        logger.warning("%s cannot be written to: what is compiled now is compiled again at the next start.", folder)
        warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry")  # one for each program
