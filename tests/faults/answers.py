"""What each of many requests is answered with, to be compared with what it is answered where nothing fails."""

import asyncio
import itertools
from typing import Any

import orjson

from hex_llm.bench.http_client import HttpClient, HttpError
from tests.server.load import COMPLETED, LOST, Ledger, random_bodies
from tests.server.servers import RunningServer


def bodies(count: int, *, context: int = 256, vocabulary: int = 250, tokens: int = 40, seed: int = 0) -> list[dict]:
    """As `random_bodies` has them, and each with the answers that its own words and seed give it."""
    made = itertools.islice(random_bodies(seed, context, vocabulary, tokens), count)
    return [body | {"seed": number} for number, body in enumerate(made)]


def answers(server: RunningServer, asked: list[dict[str, Any]], *, concurrency: int) -> list[str]:
    """Of each request the texts, or `error:` and its code; `lost:` and why, where there was no answer."""
    return asyncio.run(answers_of(server, asked, concurrency=concurrency))


async def answers_of(server: RunningServer, asked: list[dict[str, Any]], *, concurrency: int) -> list[str]:
    client = HttpClient(server.url, server.headers)
    left, found = iter(enumerate(asked)), [""] * len(asked)

    async def one_after_the_other() -> None:
        for number, body in left:
            try:
                async with client.request("POST", "/v1/completions", orjson.dumps(body)) as response:
                    found[number] = _read(await response.read_all(), streamed=bool(body.get("stream")))
            except (HttpError, ValueError, KeyError, IndexError) as error:
                found[number] = f"lost: {type(error).__name__} {error}"

    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
    client.close()
    return found


def ledger_of(found: list[str]) -> Ledger:
    """How the requests ended that were answered so."""
    ledger = Ledger()
    for each in found:
        kind, _, code = each.partition(":")
        ledger.note(COMPLETED if kind.startswith("[") else code if kind == "error" else LOST, each[:200])
    return ledger


def _read(content: bytes, *, streamed: bool) -> str:
    if not streamed or content.startswith(b"{"):
        events = [orjson.loads(content)]
    else:
        data = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: ")]
        events = [orjson.loads(each) for each in data if each != b"[DONE]"]
        if data[-1] != b"[DONE]" and "error" not in events[-1]:
            return "lost: a stream was cut without a word"
    texts: dict[int, str] = {}
    for event in events:
        if "error" in event:
            return f"error:{event['error']['code']}"
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return orjson.dumps([texts[index] for index in sorted(texts)]).decode()
