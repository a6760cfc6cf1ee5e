"""config.json, read once into a typed value."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hex_llm.model_fields import Fields
from hex_llm.model_files import read_json
from hex_llm.models.arch import Arch
from hex_llm.models.registry import FAMILIES
from hex_llm.quantization.method import Method
from hex_llm.quantization.read import quantization_fields, read_method

_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    arch: Arch
    dtype: str | None  # what the weights were saved in, where the file says so
    quantization: Method | None = None  # how those in few bits are kept


def read_config(folder: Path) -> ModelConfig:
    """The model that the folder's config.json describes."""
    path = folder / "config.json"
    return parse_config(read_json(path), str(path), folder)


def parse_config(values: Mapping[str, Any], source: str, folder: Path | None = None) -> ModelConfig:
    """The model that a config describes; `source` names it in messages. Of old models, the folder has more of it."""
    fields = Fields(source, values)
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    section = quantization_fields(fields, folder)
    method = None if section is None else read_method(section)
    return ModelConfig(family.read_arch(fields), _dtype(fields), method)


def _architecture(fields: Fields) -> str:
    if not fields.has("architectures"):
        raise fields.refuse("architectures", "is missing")
    named = fields.values["architectures"]
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        raise fields.refuse("architectures", "is not a list of names")
    if named[0] not in FAMILIES:
        served = ", ".join(name.removesuffix("ForCausalLM") for name in FAMILIES if name.endswith("ForCausalLM"))
        raise fields.refuse("architectures", f"is {named[0][:60]!r}, and the decoders served are {served}")
    return named[0]


def _dtype(fields: Fields) -> str | None:
    """Where there is a vision tower too, the file may say it of the language model only."""
    text = fields.section("text_config")
    return _named_dtype(fields) or (_named_dtype(text) if text else None)


def _named_dtype(fields: Fields) -> str | None:
    for name in ("dtype", "torch_dtype"):
        if fields.has(name):
            dtype = fields.text(name)
            if dtype not in _DTYPES:
                raise fields.refuse(name, f"is {dtype[:60]!r}, not one of {', '.join(_DTYPES)}")
            return dtype
    return None
