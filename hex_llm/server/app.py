"""The ASGI application: from a path to its handler, and from what a handler raises to an answer.

Every request that comes in is counted once more when it ends, as completed, failed, cancelled or rejected.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.middleware.cors import CORSMiddleware

from hex_llm.errors import MethodNotAllowed, NotFound, RequestError, RequestTimeout, Unauthorized
from hex_llm.server import card, chat, completions, docs, health, models, pages, tokens, vertex
from hex_llm.server.errors_json import error_body, error_headers, told
from hex_llm.server.exchange import ClientGone, Exchange
from hex_llm.server.request_log import log_request
from hex_llm.server.state import Phase, Server

logger = logging.getLogger(__name__)

type Handler = Callable[[Server, Exchange], Awaitable[None]]


class Route(NamedTuple):
    method: str
    handler: Handler
    open: bool = False  # to everybody, whatever keys there are
    counted: bool = True  # in the ledger and the log


def routes(server: Server, environ: Mapping[str, str] = os.environ) -> dict[str, Route]:
    ping = Route("GET", health.ping, open=True, counted=False)
    generate = Route("POST", vertex.generate)
    table = {
        "/v1/chat/completions": Route("POST", chat.chat_completions),
        "/v1/completions": Route("POST", completions.completions),
        "/v1/models": Route("GET", models.list_models),
        "/tokenize": Route("POST", tokens.tokenize),
        "/detokenize": Route("POST", tokens.detokenize),
        "/generate": generate,
        "/ping": ping,
        "/health": ping,
        "/live": Route("GET", health.live, open=True, counted=False),
        "/version": Route("GET", health.version),
        "/metrics": Route("GET", health.show_metrics, counted=False),
    }
    if server.config.enable_docs:
        table |= {"/docs": Route("GET", docs.page), "/openapi.json": Route("GET", docs.openapi)}
    if server.config.playground:
        table |= dict.fromkeys(pages.FILES, Route("GET", pages.show_file, open=True, counted=False))
        table[card.PATH] = Route("GET", card.show_card)
    for variable, route in (("AIP_HEALTH_ROUTE", ping), ("AIP_PREDICT_ROUTE", generate)):
        if path := environ.get(variable):
            table[path] = route
    return table


CLIENT_GONE = 499  # in metrics and logs only: nobody is there to be told
_MODEL = Route("GET", models.show_model)


class App:
    def __init__(self, server: Server):
        self._server = server
        self._routes = routes(server)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        server, path = self._server, scope["path"]
        route = self._routes.get(path) or (_MODEL if path.startswith(models.PREFIX) else None)
        name = path if path in self._routes else models.PREFIX if route else "other"
        exchange = Exchange(scope, receive, send, server.config)
        if route is not None and not route.counted:
            await self._handle(route, exchange)
            return
        metrics = server.metrics
        metrics.received.labels(name).inc()
        metrics.in_flight.inc()
        server.open.add(exchange)
        limit = server.config.request_timeout_s
        late = RequestTimeout(f"The request took more than {limit:g} s, the limit of this server.")
        timer = asyncio.get_running_loop().call_later(limit, exchange.fail, late)
        outcome, code = "failed", None
        try:
            outcome, code = await self._handle(route, exchange)
        finally:
            timer.cancel()
            server.open.discard(exchange)
            metrics.in_flight.dec()
            metrics.requests.labels(name, outcome).inc()
            metrics.responses.labels(name, str(exchange.status or CLIENT_GONE)).inc()
            if outcome == "rejected":
                metrics.rejected.labels(code or "invalid_request").inc()
            log_request(server, exchange, outcome, code)

    async def _handle(self, route: Route | None, exchange: Exchange) -> tuple[str, str | None]:
        """Runs the handler, and answers in its stead where it raises; returns how the request ended, and the error's
        code.
        """
        try:
            with exchange.handled():
                await self._dispatch(route, exchange)
            return "completed", None
        except (Exception, asyncio.CancelledError) as error:
            cause = exchange.cause(error)
            if isinstance(cause, ClientGone):
                return "cancelled", None
            return await self._answer(route, exchange, cause)
        finally:
            exchange.close()

    async def _dispatch(self, route: Route | None, exchange: Exchange) -> None:
        # The key comes first: who has none learns nothing, not even which paths there are.
        if route is None or not route.open:
            exchange.key_id = self._server.keys.check(exchange.headers.get("authorization"))
        if route is None:
            raise NotFound(f"There is no {exchange.path[:100]} here.")
        if exchange.method != route.method and not (route.method == "GET" and exchange.method == "HEAD"):
            raise MethodNotAllowed(f"{exchange.method[:20]} is not what {exchange.path} takes; use {route.method}.")
        await route.handler(self._server, exchange)

    async def _answer(self, route: Route | None, exchange: Exchange, cause: Exception) -> tuple[str, str | None]:
        metrics = self._server.metrics
        error = told(cause, exchange.request_id)
        if error is not cause:
            logger.error("Request %s failed for a fault of ours.", exchange.request_id, exc_info=cause)
            metrics.internal_errors.inc()
        if exchange.begun:  # the stream has told
            metrics.stream_errors.inc()
            return "failed", error.code
        headers = error_headers(error)
        if isinstance(error, MethodNotAllowed) and route is not None:
            headers.append(("Allow", route.method))
        if isinstance(error, Unauthorized):
            headers.append(("WWW-Authenticate", "Bearer"))
        if self._server.phase == Phase.DRAINING:
            headers.append(("Connection", "close"))
        try:
            await exchange.reply(error.status, error_body(error), headers=headers)
        except ClientGone:
            return "cancelled", error.code
        refused = isinstance(error, RequestError) and exchange.generation is None
        return "rejected" if refused or error.code in _REFUSALS else "failed", error.code


_REFUSALS = ("starting", "draining", "queue_timeout")


def make_app(server: Server) -> Any:
    app: Any = App(server)
    if server.config.cors_origins:
        origins = [each.strip() for each in server.config.cors_origins.split(",")]
        app = CORSMiddleware(
            app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], allow_credentials=False
        )
    return app


async def keep_time(server: Server) -> None:
    """Keeps an eye on how late the event loop is, and hands the metrics on that are added up on the way."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.5)
        server.loop_lag = time.monotonic() - before - 0.5
        server.metrics.flush()
