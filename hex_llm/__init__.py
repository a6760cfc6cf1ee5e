"""Hex-LLM, open: a server for open LLMs on XLA (TPU, GPU, CPU)."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hex_llm.config import Config
    from hex_llm.engine.request import SamplingParams
    from hex_llm.llm import LLM
    from hex_llm.version import __version__

__all__ = ["LLM", "Config", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "hex_llm.llm",
    "Config": "hex_llm.config",
    "SamplingParams": "hex_llm.engine.request",
    "__version__": "hex_llm.version",
}


def __getattr__(name: str) -> object:
    # Imported when first used: a program that only wants the settings should not wait for JAX.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
