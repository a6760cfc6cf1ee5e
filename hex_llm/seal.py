"""What goes before each message: over a network a signature, so that whoever does not know the key can neither say
anything nor repeat it; within a machine its number, so that none is missed in silence.
"""

import hmac
from collections.abc import Buffer
from typing import NamedTuple

NONCE = 32  # bytes that each end of a connection chooses, so that no two connections are alike
TAG = 32  # bytes of a signature


class Seal:
    """Signs, or checks, the messages of one direction of one connection, in their order."""

    size = TAG
    complaint = "is not signed by whoever the connection was made with"

    def __init__(self, key: bytes):
        self._key = key
        self._number = 0

    def sign(self, body: Buffer) -> bytes:
        """The signature of the next message."""
        number, self._number = self._number, self._number + 1
        return hmac.digest(self._key, number.to_bytes(8) + body, "sha256")

    def fits(self, tag: bytes, body: Buffer) -> bool:
        """Whether this is the signature of the next message."""
        return hmac.compare_digest(self.sign(body), tag)


class Numbering:
    """The same for a connection on which only the order is in question."""

    size = 8
    complaint = "is not the next: one before it has been lost"

    def __init__(self) -> None:
        self._number = 0

    def sign(self, body: Buffer) -> bytes:
        number, self._number = self._number, self._number + 1
        return number.to_bytes(self.size)

    def fits(self, tag: bytes, body: Buffer) -> bool:
        return self.sign(body) == tag


class Seals(NamedTuple):
    """Those of one end of a connection."""

    outgoing: Seal | Numbering
    incoming: Seal | Numbering


def proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    """What only an end that knows the key can answer to the nonces of both; who: b"caller" or b"callee"."""
    return hmac.digest(key, b"hex-llm proof " + who + nonces, "sha256")


def seals(key: bytes, nonces: bytes, *, caller: bool) -> Seals:
    """Each direction has a key of its own: nothing that an end has said can be said to it."""
    by_caller, by_callee = (
        Seal(hmac.digest(key, b"hex-llm frames of the " + who + nonces, "sha256")) for who in (b"caller", b"callee")
    )
    return Seals(by_caller, by_callee) if caller else Seals(by_callee, by_caller)
