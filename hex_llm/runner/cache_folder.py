"""The folder in which JAX keeps what it has compiled, for the next start."""

import glob
import logging
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from hex_llm.errors import ConfigError

logger = logging.getLogger(__name__)

_UNREADABLE = "Error reading persistent compilation cache entry for "  # how JAX's warning begins
_show_warning = warnings.showwarning  # what shows all others


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
        _have_damage_made_good()


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


def _have_damage_made_good() -> None:
    """JAX passes over an entry that it cannot read, such as one whose writer was killed, and compiles; but it writes no
    entry that is there, so that every start would do the same. All that tells of it is a warning.
    """
    global _show_warning
    if warnings.showwarning is not _show_or_drop:
        _show_warning, warnings.showwarning = warnings.showwarning, _show_or_drop


def _show_or_drop(message: Warning | str, *arguments: Any, **options: Any) -> None:
    text = str(message)
    if not text.startswith(_UNREADABLE):
        _show_warning(message, *arguments, **options)
        return
    # The warning has the program's name and not the entry's. Others of that name are compiled once more, too.
    name = text.removeprefix(_UNREADABLE).split("'")[1]
    folder = Path(jax.config.values["jax_compilation_cache_dir"])
    for path in folder.glob(f"{glob.escape(name)}-*-cache"):
        with suppress(OSError):
            path.unlink()
    logger.warning("What %s keeps of %s is damaged; it is compiled again.", folder, name)
