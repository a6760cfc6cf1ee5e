"""Parts that whoever fetches them gets for a ticket: from this process, or by JAX's transfer server."""

import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import jax
import numpy as np
from jax.experimental import transfer

from hex_llm.frames import Broken
from hex_llm.transfer.staging import Staging

_POLL_S = 2e-4

_here: dict[int, jax.Array] = {}
_tickets = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Offers:
    """How parts are offered; `linger` is how long one stays that is withdrawn."""

    offer: Callable[[jax.Array], int]
    withdraw: Callable[[int], object]
    linger: float


def _offer_here(pages: jax.Array) -> int:
    ticket = next(_tickets)
    _here[ticket] = pages
    return ticket


# To engines of this process.
HERE = Offers(_offer_here, lambda ticket: _here.pop(ticket, None), 0.0)


def take_here(ticket: int, staging: Staging) -> jax.Array:
    pages = _here.get(ticket)
    if pages is None:
        raise Broken("A part of this process is not there any more.")
    if len(pages.devices()) == 1 and not staging.sharding.is_fully_replicated:
        # JAX would cut it on the device, by a program that has to be compiled for every size.
        return jax.block_until_ready(jax.device_put(np.asarray(pages), staging.sharding))
    return jax.block_until_ready(jax.device_put(pages, staging.sharding))


class TransferServer:
    """JAX's, which moves arrays between the devices of two processes. What it says is not signed: a ticket is a number
    that nobody guesses."""

    def __init__(self, host: str):
        # Without an address to send from, a process on CPUs is aborted by the first that pulls from it.
        self._server = transfer.start_transfer_server(jax.devices()[0].client, f"{host}:0", [f"{host}:0"])

    @property
    def address(self) -> str:
        return self._server.address()

    def offers(self, seconds: float) -> Offers:
        """Each for so long, fetched or not: JAX has no way to take one back."""

        def offer(pages: jax.Array) -> int:
            ticket = secrets.randbits(62) + 1
            self._server.await_pull(ticket, [pages], timeout=datetime.now() + timedelta(seconds=seconds))
            return ticket

        return Offers(offer, lambda ticket: None, seconds)

    def connect(self, address: str) -> transfer.TransferConnection:
        return self._server.connect(address)


def pull(
    connection: transfer.TransferConnection, ticket: int, count: int, staging: Staging, *,
    seconds: float, wanted: Callable[[], bool],
) -> jax.Array:  # fmt: skip
    """The array, all of it: one that fails later would spoil what it is copied into."""
    spec = jax.ShapeDtypeStruct(staging.shape(staging.count(count)), staging.dtype, sharding=staging.sharding)
    (pages,) = connection.pull(ticket, [spec])
    deadline = time.monotonic() + seconds
    # Nothing ends a pull from a process that stands still, so nobody waits in it.
    while not pages.is_ready():
        if time.monotonic() > deadline or not wanted():
            raise Broken("A part could not be pulled.")
        time.sleep(_POLL_S)
    try:
        return jax.block_until_ready(pages)
    except jax.errors.JaxRuntimeError as error:
        raise Broken(f"A part could not be pulled: {error}") from None
