"""/v1/models: what is served, and under which names: the model, and adapters for it."""

from typing import Any

import orjson

from hex_llm.errors import NotFound
from hex_llm.server.exchange import Exchange
from hex_llm.server.state import Server

PREFIX = "/v1/models/"


async def list_models(server: Server, exchange: Exchange) -> None:
    server.check_ready()
    models = [_model(server, name) for name in (*server.names, *server.config.adapter_sources)]
    await exchange.reply(200, orjson.dumps({"object": "list", "data": models}))


async def show_model(server: Server, exchange: Exchange) -> None:
    server.check_ready()
    name = exchange.path.removeprefix(PREFIX)
    if not name:
        raise NotFound(f"A name of the model is missing after {PREFIX}.")
    server.check_model(name)
    await exchange.reply(200, orjson.dumps(_model(server, name)))


def _model(server: Server, name: str) -> dict[str, Any]:
    source = server.config.adapter_sources.get(name)
    return {
        "id": name,
        "object": "model",
        "created": int(server.started),
        "owned_by": "hex-llm",
        "root": source or server.names[0],
        "parent": server.names[0] if source else None,
        "max_model_len": server.limits.max_model_len,
    }
