"""What the hosts of a replica say to each other."""

from importlib.metadata import version
from typing import Self

import msgspec
import numpy as np

from hex_llm.runner.buckets import Bucket, Variant
from hex_llm.runner.packed_step import PackedStep


class Joined(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first word of a host that follows."""

    rank: int
    versions: str


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A host that follows cannot go on."""

    reason: str  # in words that can follow the host's name
    exit_code: int


class Step(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A packed step; arrays are the bytes of 32-bit integers."""

    bucket: Bucket
    variant: Variant
    blob: bytes
    targets: bytes | None
    admissions: tuple[bytes, ...]
    seats: tuple[bytes, ...]
    adapted: bool

    @classmethod
    def of(cls, packed: PackedStep) -> Self:
        return cls(
            packed.bucket,
            packed.variant,
            packed.blob.tobytes(),
            None if packed.targets is None else packed.targets.tobytes(),
            tuple(each.tobytes() for each in packed.admissions),
            tuple(each.tobytes() for each in packed.seats),
            packed.adapted,
        )

    def packed(self) -> PackedStep:
        return PackedStep(
            self.bucket,
            self.variant,
            _array(self.blob),
            None if self.targets is None else _array(self.targets),
            tuple(map(_array, self.admissions)),
            tuple(map(_array, self.seats)),
            self.adapted,
        )


class AdapterPart(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The next bytes of what the host's devices have of an adapter."""

    number: int  # the adapter's
    data: bytes


class Load(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An adapter of which all parts have come goes to a slot, before the steps that come next."""

    number: int
    slot: int


class Forget(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An adapter will not be loaded again."""

    number: int


class End(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The replica ends in order."""


type Order = Step | AdapterPart | Load | Forget
type ToFollower = Order | End


def versions() -> str:
    """What has to be the same on all hosts: they must compile the same programs."""
    return ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib"))


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int32)
