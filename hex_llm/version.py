"""The version, which is written in pyproject.toml and nowhere else."""

import importlib.metadata

__version__ = importlib.metadata.version("hex-llm")
