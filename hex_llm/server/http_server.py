"""uvicorn as it is used here: it has no say in signals, and a client has little time to agree on TLS."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn

from hex_llm.config import Config
from hex_llm.server.h11_protocol import protocol_class

HANDSHAKE_S = 10.0


class HttpServer(uvicorn.Server):
    def __init__(self, app: Any, config: Config):
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol_class(config),
                interface="asgi3",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes none: uvicorn would stop listening while requests under way are finished."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which has no setting for the time that a handshake may take."""
        config, loop = self.config, asyncio.get_running_loop()
        protocol = functools.partial(
            cast(Any, config.http_protocol_class), config=config, server_state=self.server_state, app_state={}
        )
        self.servers = [
            await loop.create_server(
                protocol,
                sock=each,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=HANDSHAKE_S if config.ssl else None,
            )
            for each in sockets or ()
        ]
        self.started = True

    @property
    def has_unsent(self) -> bool:
        """Whether bytes of an answer still wait for their client."""
        return any(each.transport.get_write_buffer_size() for each in self.server_state.connections)
