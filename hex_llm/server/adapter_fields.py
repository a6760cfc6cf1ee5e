"""The members of a request that name an adapter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hex_llm.config import Config
from hex_llm.errors import RequestError
from hex_llm.server.fields import Field, Fields, Kind, Only, Rules, Text, describe

_NAME = Text(at_most=1024)
_NONE = Only("", reason="this server was started without --enable_lora.")


@dataclass(frozen=True, slots=True)
class AdapterName:
    """Empty, as Vertex's notebooks send it, is as good as none."""

    def read(self, value: Any, param: str, rules: Rules) -> str:
        return _kind(rules.config).read(value, param, rules)

    def schema(self, config: Config) -> dict[str, Any]:
        return _kind(config).schema(config)


_FIELD = Field(
    AdapterName(),
    "An adapter of --lora_modules by its name, or any that --lora_allowed_prefixes allows by where it lies:"
    " gs://BUCKET/PATH, or OWNER/NAME of the Hugging Face Hub. Empty: none.",
)
_NAMES = ("dynamic-lora", "dynamic_lora", "lora_id", "lora_path")
ADAPTER: Fields = {
    _NAMES[0]: _FIELD,
    **dict.fromkeys(_NAMES[1:], _FIELD._replace(help=f"Another word for {_NAMES[0]}.")),
}


def read_adapter(values: Mapping[str, Any], config: Config) -> str | None:
    """The adapter that checked values ask for, which `model` may name, too."""
    given = {name: values[name] for name in ADAPTER if values.get(name)}
    if (model := values.get("model")) in config.adapter_sources:
        given["model"] = model
    sources = {name: config.adapter_sources.get(adapter, adapter) for name, adapter in given.items()}
    if len(set(sources.values())) > 1:
        all_given = " and ".join(f"{name}={describe(adapter)}" for name, adapter in given.items())
        raise RequestError(f"{all_given} are not the same adapter; a request has one.", param=next(iter(given)))
    return next(iter(given.values()), None)


def _kind(config: Config) -> Kind:
    return _NAME if config.enable_lora else _NONE
