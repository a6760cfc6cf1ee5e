"""A server that has files, asked over HTTP: who asks, what its refusals mean, which of them may pass."""

import email.utils
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from hex_llm import faults
from hex_llm.download.patience import Again, Patience, persist
from hex_llm.errors import DownloadError

_CONNECT_S = 10.0
_FIRST_READ_S, _LONGEST_READ_S = 10.0, 60.0  # without a byte, after which a connection is given up
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # statuses that may be others in a while
_LONGEST_REASON = 300
# What no other try would change. Their texts are not shown: what cannot be sent may be a token.
_HOPELESS = (
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
    httpx.DecodingError,
    httpx.TooManyRedirects,
    httpx.InvalidURL,
)


@dataclass(frozen=True, slots=True)
class Site:
    """`identify` makes the headers that say who asks: `address` gets them, and nobody that it sends one on to.
    `hints` say what a status is likely to mean there.
    """

    address: str
    identify: Callable[[], Mapping[str, str]]
    hints: Mapping[int, str] = field(default_factory=dict)
    client: httpx.Client = field(
        default_factory=lambda: httpx.Client(
            follow_redirects=True,
            limits=httpx.Limits(max_connections=None),
            headers={"User-Agent": "hex-llm", "Accept-Encoding": "identity"},
        )
    )

    def get_json(self, what: str, url: str, patience: Patience) -> dict[str, Any]:
        """`what` names it in messages."""

        def attempt(number: int) -> dict[str, Any]:
            with self.open(what, url, attempt=number) as response:
                response.read()
            try:
                values = orjson.loads(response.content)
            except orjson.JSONDecodeError:
                values = None
            if not isinstance(values, dict):
                raise DownloadError(f"{what}: {self.address} answers with something that is no JSON object.")
            patience.renew()
            return values

        return persist(attempt, patience)

    @contextmanager
    def open(
        self, what: str, url: str, *, span: tuple[int, int] | None = None, attempt: int = 0
    ) -> Iterator[httpx.Response]:
        """The answer to GET, whose body has yet to be read. `span` are the first byte and the one after the last.

        Raises Again or DownloadError, also while the body is read.
        """
        headers = dict(self.identify()) if url.startswith(f"{self.address}/") else {}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        read = min(_FIRST_READ_S * 2**attempt, _LONGEST_READ_S)
        timeout = httpx.Timeout(read, connect=_CONNECT_S, pool=None)
        try:
            match faults.reach("source.open"):
                case "429" | "503" as status:
                    raise Again(f"{what}: {_host(url)} answers {status}, for {faults.VARIABLE} wants it to.")
                case faults.RESET:
                    raise httpx.ReadError(f"reset, for {faults.VARIABLE} wants it to be")
            with self.client.stream("GET", url, headers=headers, timeout=timeout) as response:
                if response.status_code not in (200, 206):
                    raise self._refusal(what, response)
                yield response
        except _HOPELESS as error:
            raise DownloadError(f"{what}: {_host(url)} does not lead to it ({type(error).__name__}).") from None
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise Again(f"{what}: the connection to {_host(url)} failed ({reason[:_LONGEST_REASON]}).") from None

    def _refusal(self, what: str, response: httpx.Response) -> Again | DownloadError:
        status, reason = response.status_code, _reason(response)
        said = f"{what}: {_host(str(response.url))} answers {status}{f' ({reason})' if reason else ''}."
        if status in _PASSING:
            return Again(said, _retry_after(response))
        hint = self.hints.get(status, "")
        return DownloadError(f"{said} {hint}".rstrip(), status=status)


def _host(url: str) -> str:
    parsed = httpx.URL(url)
    return f"{parsed.scheme}://{parsed.netloc.decode()}"


def _reason(response: httpx.Response) -> str:
    """In the other side's words, on one line: the hub's are in a header, those of Cloud Storage in a JSON body."""
    words: Any = response.headers.get("x-error-message")
    if words is None:
        try:
            words = orjson.loads(response.read())["error"]
            words = words["message"] if isinstance(words, dict) else words
        except (httpx.TransportError, orjson.JSONDecodeError, KeyError, TypeError):
            words = response.reason_phrase
    return " ".join(str(words).split())[:_LONGEST_REASON].rstrip(".")


def _retry_after(response: httpx.Response) -> float:
    """In seconds; the header has them, or a date, or is not there."""
    text = response.headers.get("retry-after", "")
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0
