"""What two Porters say to each other. The one that fetches blocks calls the one whose engine has them."""

import msgspec


class Word(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """One message. `number` is that of a fetch, which whoever fetches chooses: no two of a connection are alike, so
    that late words about a request are not taken for words about the same one asked for again."""


class Layout(msgspec.Struct, array_like=True, frozen=True):
    """What parts look like; they can only be had from an engine where they look the same."""

    block: tuple[int, ...]  # the dimensions of a part but for its blocks
    dtype: str
    part_blocks: int  # the most that a part has


class Hello(Word, frozen=True):
    """Both ends begin with it, whoever calls first."""

    layout: Layout
    process: str  # no two processes have the same
    platform: str
    num_devices: int
    split: str  # how a part lies on them
    transfer_server: str  # where JAX's listens; empty where there is none


class Begin(Word, frozen=True):
    """How blocks shall be carried, and whether a file of shared memory comes with the next byte."""

    path: str
    shared: bool


class Ask(Word, frozen=True):
    number: int
    request_id: str
    first: int


class Drop(Word, frozen=True):
    """The fetch is given up."""

    number: int


class Done(Word, frozen=True):
    """All has come, and is kept."""

    number: int


class Freed(Word, frozen=True):
    """A slot is free for another part."""

    slot: int


class Carried(Word, frozen=True):
    """A part is in a slot, or its bytes come next, or it can be had for the ticket."""

    number: int
    first: int
    count: int
    slot: int
    ticket: int
    seconds: float  # that it has taken so far, once it was computed


class Finished(Word, frozen=True):
    """The token after the last block, which is the one before `end`. Parts may still be on their way."""

    number: int
    token: int
    end: int


class Refused(Word, frozen=True):
    number: int
    reason: str


class Beat(Word, frozen=True):
    """Nothing but a sign of life."""


type FromFetcher = Ask | Drop | Done | Freed | Beat
type FromSource = Carried | Finished | Refused | Beat
