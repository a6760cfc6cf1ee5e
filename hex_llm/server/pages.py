"""The playground: a page at /, and the files that it is made of.

They are the same for everybody and hold no data, so they need no key. They are read once, when the server starts, and
known by their names: no path of a request ever becomes the path of a file.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

from hex_llm.server.exchange import Exchange
from hex_llm.server.state import Server

PREFIX = "/playground/"
_FOLDER = Path(__file__).parent / "playground"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = (
    # Nothing from elsewhere, no script in the page itself, and no other page around it.
    (
        "Content-Security-Policy",
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    ),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),  # kept, and asked about: a server that was updated has its own files
)


class _File(NamedTuple):
    body: bytes
    content_type: str
    tag: str


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')


FILES = {
    "/" if path.name == "index.html" else PREFIX + path.name: _read(path)
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}


async def show_file(server: Server, exchange: Exchange) -> None:
    file = FILES[exchange.path]
    headers = (*_HEADERS, ("ETag", file.tag))
    known = (tag.strip().removeprefix("W/") for tag in exchange.headers.get("if-none-match", "").split(","))
    if file.tag in known:
        await exchange.reply(304, b"", content_type=file.content_type, headers=headers)
    else:
        await exchange.reply(200, file.body, content_type=file.content_type, headers=headers)
