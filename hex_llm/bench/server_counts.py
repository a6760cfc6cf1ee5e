"""What a server has counted during a run, from its /metrics; other servers than ours count other things."""

import asyncio
import re
from collections import defaultdict
from dataclasses import astuple, dataclass

from hex_llm.bench.http_client import HttpClient, HttpError

_TIMEOUT_S = 10.0
_NEWS_S = 1.5  # after which a server's engines have told it all that they had counted before: they do every second
_SAMPLE = re.compile(r"^hexllm:(\w+)(?:\{.*\})? (\d+(?:\.\d*)?(?:e[+-]?\d+)?)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """KV blocks that went from one engine to another, by request, and steps that were compiled while serving."""

    transfers: float
    transfer_bytes: float
    transfer_s: float  # that it took to carry blocks, part by part, once they were computed
    exposed_s: float  # from a first token's being there to the last block's
    failed_transfers: float
    late_compiles: float

    @classmethod
    def parse(cls, text: str) -> "ServerCounts | None":
        """None where it is not one of our servers that says this."""
        sums: defaultdict[str, float] = defaultdict(float)
        for name, value in _SAMPLE.findall(text):
            sums[name] += float(value)
        if not sums:
            return None
        return cls(
            transfers=sums["kv_transfers_total"],
            transfer_bytes=sums["kv_transfer_bytes_total"],
            transfer_s=sums["kv_transfer_seconds_total"],
            exposed_s=sums["kv_transfer_exposed_seconds_total"],
            failed_transfers=sums["kv_transfer_failures_total"],
            late_compiles=sums["xla_compiles_after_ready_total"],
        )

    def since(self, before: "ServerCounts") -> "ServerCounts":
        return ServerCounts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    @property
    def transfer_rate(self) -> float:
        """Bytes a second, of the time that they were carried in."""
        return self.transfer_bytes / self.transfer_s if self.transfer_s else 0.0

    @property
    def mean_transfer_ms(self) -> float:
        return 1000 * self.transfer_s / self.transfers if self.transfers else 0.0

    @property
    def mean_exposed_ms(self) -> float:
        return 1000 * self.exposed_s / self.transfers if self.transfers else 0.0


async def read_counts(client: HttpClient) -> ServerCounts | None:
    """All that a server has counted until now. None where it is not one of ours, or does not say."""
    if await _read(client) is None:
        return None
    await asyncio.sleep(_NEWS_S)
    return await _read(client)


async def _read(client: HttpClient) -> ServerCounts | None:
    try:
        async with asyncio.timeout(_TIMEOUT_S), client.request("GET", "/metrics") as response:
            content = await response.read_all()
    except (HttpError, TimeoutError):
        return None
    return ServerCounts.parse(content.decode(errors="replace")) if response.status == 200 else None
