"""Carries parts between this engine and those of other processes and hosts: a `Porter` of `engine/handover`."""

from collections.abc import Callable

from hex_llm.engine.handover import FromPorter, Part
from hex_llm.transfer.copying import prepare
from hex_llm.transfer.fetching import Fetching
from hex_llm.transfer.giving import Giving
from hex_llm.transfer.offers import TransferServer
from hex_llm.transfer.paths import PROCESS, Asked
from hex_llm.transfer.source import Source
from hex_llm.transfer.staging import Staging, layout_of
from hex_llm.transfer.words import Hello

SILENCE_S = 30.0  # after which an engine that says nothing, or takes nothing, counts as gone
# For a request of which nothing comes though its engine lives: longer, since it may wait behind one of an engine that
# takes nothing.
PATIENCE_S = 120.0


class DevicePorter:
    """`tell` is called from several threads, and must neither wait nor call anything here."""

    def __init__(
        self, address: str, key: bytes, staging: Staging, tell: Callable[[FromPorter], None], *, path: Asked = "auto",
        silence: float = SILENCE_S, patience: float = PATIENCE_S,
    ):  # fmt: skip
        """Listens at `address`; raises PortError where that cannot be."""
        prepare(staging)
        server = TransferServer(_host(address)) if path == "jax" else None
        devices = staging.sharding.device_set
        hello = Hello(
            layout_of(staging),
            PROCESS,
            next(iter(devices)).platform,
            len(devices),
            str(staging.sharding.shard_shape(staging.shape(max(staging.counts)))),
            server.address if server is not None else "",
        )

        def connect(source: str, fetching: Fetching) -> Source:
            return Source(source, key, hello, staging, fetching, path=path, server=server, silence=silence)

        self._fetching = Fetching(connect, staging, tell=tell, patience=patience)
        self._giving = Giving(address, key, hello, staging, tell=tell, server=server, silence=silence)

    @property
    def address(self) -> str:
        return self._giving.address

    def has_room(self, request_id: str | None = None) -> bool:
        """For a part of this request; else for one of a request that nobody has a share of yet."""
        return self._giving.has_room(request_id)

    def send(self, part: Part) -> None:
        self._giving.send(part)

    def finish(self, request_id: str, token: int) -> None:
        self._giving.finish(request_id, token)

    def refuse(self, request_id: str, reason: str) -> None:
        self._giving.refuse(request_id, reason)

    def fetch(self, request_id: str, source: str, first: int) -> None:
        self._fetching.fetch(request_id, source, first)

    def took(self, part: Part) -> None:
        self._fetching.took(part)

    def acknowledge(self, request_id: str) -> None:
        self._fetching.acknowledge(request_id)

    def cancel(self, request_id: str) -> None:
        self._fetching.cancel(request_id)
        self._giving.refuse(request_id, "it was cancelled")

    def close(self) -> None:
        """Ends all connections; the threads end on their own."""
        self._fetching.close()
        self._giving.close()


def _host(address: str) -> str:
    """Where JAX's server listens beside this address."""
    return "127.0.0.1" if address.startswith("unix:") else address.removeprefix("tcp:").rpartition(":")[0]
