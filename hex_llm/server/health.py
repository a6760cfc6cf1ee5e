"""/ping, /health, /live, /version and /metrics: how the server is."""

import orjson

from hex_llm.server import metrics
from hex_llm.server.exchange import Exchange
from hex_llm.server.state import Phase, Server
from hex_llm.version import __version__


async def ping(server: Server, exchange: Exchange) -> None:
    """200 only where a request would be served; the body says why not."""
    body: dict[str, object] = {"status": server.phase}
    if server.phase == Phase.STARTING:
        progress = server.engine.progress
        body |= {"phase": progress.phase, "progress": round(progress.done, 3)}
    ready = server.phase == Phase.READY
    if ready and len(server.engine.replicas) > 1:
        body |= {"replicas": len(server.engine.replicas), "replicas_up": server.engine.num_up}
        for role in filter(None, dict.fromkeys(server.roles)):
            up = [each.is_up for each in server.engine.replicas if server.roles[each.index] == role]
            body |= {role: len(up), f"{role}_up": sum(up)}
    await exchange.reply(200 if ready else 503, orjson.dumps(body), headers=() if ready else (("Retry-After", "1"),))


async def live(server: Server, exchange: Exchange) -> None:
    """200 wherever this process can answer at all."""
    await exchange.reply(200, orjson.dumps({"status": server.phase}))


async def version(server: Server, exchange: Exchange) -> None:
    await exchange.reply(200, orjson.dumps({"version": __version__}))


async def show_metrics(server: Server, exchange: Exchange) -> None:
    text = server.metrics.render(server.engine, server.gauges)
    await exchange.reply(200, text, content_type=metrics.CONTENT_TYPE)
