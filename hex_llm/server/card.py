"""/playground/card.json: what the playground has to know of the model, and of what it may ask for."""

from typing import Any

import orjson

from hex_llm.config import Config
from hex_llm.flags import flags_of
from hex_llm.server.completion_schema import DEFAULT_MAX_TOKENS
from hex_llm.server.exchange import Exchange
from hex_llm.server.sampling_fields import SAMPLING
from hex_llm.server.state import Server
from hex_llm.version import __version__

PATH = "/playground/card.json"
_ARGUMENTS = ("temperature", "top_p", "top_k", "max_tokens", "seed")
_WHOLE_IN_BROWSERS = 2**53 - 1  # JavaScript rounds larger ones


async def show_card(server: Server, exchange: Exchange) -> None:
    server.check_ready()
    await exchange.reply(200, orjson.dumps(_card(server)))


def _card(server: Server) -> dict[str, Any]:
    config, limits, ready = server.config, server.limits, server.ready
    return {
        "version": __version__,
        "names": server.names,
        "architecture": ready.facts.architecture,
        "num_parameters": ready.facts.num_parameters,
        "context": limits.context,
        "dtype": ready.dtype,
        "quantization": ready.facts.quantization,
        "kv_cache_dtype": ready.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        "kv_tokens": limits.kv_tokens,
        "device": ready.device,
        "num_engines": config.num_engines,
        "prefix_caching": limits.prefix_caching,
        "flags": _flags(config),
        "has_chat": bool(config.chat_template or server.tokenizer.chat_template),
        "needs_salt": config.prefix_cache_isolation == "salt",
        "adapters": tuple(config.adapter_sources),
        "adapter_prefixes": config.adapter_prefixes,
        "arguments": {name: _argument(server, name) for name in _ARGUMENTS},
        "stop": {"most": config.max_stop_strings, "longest": config.max_stop_length},
        "completion_max_tokens": DEFAULT_MAX_TOKENS,
    }


def _argument(server: Server, name: str) -> dict[str, Any]:
    """Its limits, in the words of JSON Schema, and what counts where a request does not have it."""
    schema = SAMPLING[name].kind.schema(server.config)
    if name == "max_tokens":  # a prompt has a token at least
        schema["maximum"] = max(server.limits.context - 1, 1)
    for end, sign in (("minimum", -1), ("maximum", 1)):
        if abs(schema.get(end, 0)) > _WHOLE_IN_BROWSERS:
            schema[end] = sign * _WHOLE_IN_BROWSERS
    default = server.tokenizer.defaults.given.get(name, {"temperature": 1, "top_p": 1}.get(name))
    return {**schema, "default": default, "help": SAMPLING[name].help}


def _flags(config: Config) -> dict[str, Any]:
    """Those of the engine that are not as they would be by themselves. The server's own are nobody's business."""
    defaults = {flag.name: flag.default for flag in flags_of(Config)}
    return {name: value for name, value in config.of_engine().items() if value != defaults[name]}
