"""Where the package's log goes. Modules write to `logging.getLogger(__name__)`; only programs call `configure`."""

import logging
import os
import sys

from hex_llm.errors import ConfigError

PLAIN = "%(asctime)s %(levelname)s %(message)s"
VERBOSE = "%(asctime)s.%(msecs)03d %(levelname)s %(process)d %(threadName)s %(name)s:%(lineno)d %(message)s"


def configure(who: str = "") -> None:
    """Sends the log to stderr, as HEX_LLM_LOG_LEVEL and HEX_LLM_VERBOSE_LOG say. A second call replaces the first.

    `who` is in front of every line, where several processes or threads write the same: a text as formats of `logging`
    are.
    """
    handler = logging.StreamHandler(sys.stderr)
    form = (VERBOSE if verbose() else PLAIN).replace("%(message)s", f"{who}%(message)s")
    handler.setFormatter(logging.Formatter(form, datefmt="%Y-%m-%d %H:%M:%S"))
    logger = logging.getLogger("hex_llm")
    logger.setLevel(_level())
    logger.handlers = [handler]


def configure_if_nobody_did() -> None:
    """For a program that uses the package as a library and has said nothing about logging."""
    if not logging.getLogger("hex_llm").handlers and not logging.getLogger().handlers:
        configure()


def _level() -> int:
    name = os.environ.get("HEX_LLM_LOG_LEVEL", "INFO")
    levels = logging.getLevelNamesMapping()
    if name.upper() not in levels:
        raise ConfigError(f"HEX_LLM_LOG_LEVEL={name} is not one of {', '.join(levels)}.")
    return levels[name.upper()]


def verbose() -> bool:
    """Whether HEX_LLM_VERBOSE_LOG asks for everything, prompts too."""
    text = os.environ.get("HEX_LLM_VERBOSE_LOG", "false")
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"HEX_LLM_VERBOSE_LOG={text} must be true or false.")
    return text.lower() == "true"
