"""Sends answers while they are written: all that is new at once, however slow the client was with what came before."""

import asyncio
from typing import Protocol

from hex_llm.completion import Answer
from hex_llm.errors import RequestError, ServerError
from hex_llm.server.errors_json import told
from hex_llm.server.exchange import ClientGone, Exchange
from hex_llm.server.generation import Generation

KEEP_ALIVE_S = 15.0


class Frames(Protocol):
    """How a stream is written."""

    content_type: str
    keep_alive: bytes  # tells proxies that somebody is there while the first token is waited for; may be nothing

    def first(self) -> bytes:
        """What comes before any answer."""
        ...

    def more(self, position: int, answer: Answer) -> bytes:
        """What an answer has gained, and its end where it has ended; nothing where there is nothing to tell."""
        ...

    def last(self) -> bytes:
        """What comes when all have ended."""
        ...

    def error(self, error: RequestError | ServerError) -> bytes: ...


async def stream(exchange: Exchange, generation: Generation, frames: Frames) -> None:
    """Sends a generation to its end. What goes wrong is raised; where the stream has begun, it is told there first."""
    try:
        await _wait_aloud(exchange, generation, frames)
        left = list(enumerate(generation.answers))
        while left:
            data = b"".join([frames.more(position, answer) for position, answer in left])
            if generation.num_left < len(left):
                left = [(position, answer) for position, answer in left if not answer.finished]
            if data:
                if not exchange.begun:
                    data = await _begin(exchange, frames) + data
                await exchange.send(data)
            if left:
                await generation.wait()
        # An answer may end with its first token: then there was nothing to begin with.
        opening = b"" if exchange.begun else await _begin(exchange, frames)
        await exchange.send(opening + frames.last())
    except (Exception, asyncio.CancelledError) as error:
        cause = exchange.cause(error)
        if exchange.begun and not isinstance(cause, ClientGone):
            # Nothing says that it is done: what was sent is not all.
            await exchange.send(frames.error(told(cause, exchange.request_id)))
            await exchange.end_stream()
        raise cause from None
    await exchange.end_stream()


async def _begin(exchange: Exchange, frames: Frames) -> bytes:
    await exchange.begin_stream(frames.content_type)
    return frames.first()


async def _wait_aloud(exchange: Exchange, generation: Generation, frames: Frames) -> None:
    while True:
        try:
            return await asyncio.wait_for(generation.wait(), KEEP_ALIVE_S if frames.keep_alive else None)
        except TimeoutError:
            opening = b"" if exchange.begun else await _begin(exchange, frames)
            await exchange.send(opening + frames.keep_alive)
