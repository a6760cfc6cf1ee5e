"""What the HTTP processes and the engine's process say to each other, as `frames` carries it.

A request belongs to the process that sent it: its outputs go there, and end with it.
"""

import msgspec

from hex_llm.engine.limits import Limits
from hex_llm.engine.output import Output, Stats
from hex_llm.engine.request import FinishReason, Request

BLOCKS_LOST = "blocks_lost"  # the code of a `Refused`: another engine may take the request on


class Add(msgspec.Struct, tag=True, array_like=True):
    """`group` is what the sequences of one HTTP request have in common: once the engine has begun with one of them,
    the others may wait for as long as that takes. `waited` is for how many seconds it has waited in another place; None
    where it, or one of its group, has begun there.
    """

    request: Request
    group: str
    waited: float | None = 0.0


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Ends requests; what of them is on its way may still come."""

    request_ids: list[str]
    reason: FinishReason


class Beat(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Sent now and then: messages are numbered, and whatever comes next shows whether one is missing."""


class Hello(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first word of an engine that connects to an HTTP process, before all others."""

    replica: int
    pid: int
    machine: str  # on which the pid is that process's; see `process.machine`


class Starting(msgspec.Struct, tag=True, array_like=True):
    """How far the engine has come with getting ready; also sent where it compiles later on, with `done` 1 after it."""

    phase: str
    done: float


class Found(msgspec.Struct, tag=True, array_like=True):
    """What is known of the model long before it is loaded."""

    max_model_len: int
    vocab_size: int
    modules: dict[str, tuple[int, int]] = {}  # that adapters can change, with what goes in and comes out


class Facts(msgspec.Struct, array_like=True):
    """What people want to know of a model, and programs do not."""

    architecture: str = ""
    num_parameters: int = 0
    quantization: str | None = None  # None: its weights are in 16 or 32 bits


class Ready(msgspec.Struct, tag=True, array_like=True):
    limits: Limits
    dtype: str
    device: str
    pages: str = ""  # the address at which other engines may fetch blocks
    facts: Facts = msgspec.field(default_factory=Facts)


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The engine could not start, or cannot go on; it has said why."""

    exit_code: int


class Stepped(msgspec.Struct, tag=True, array_like=True):
    """What one step brought to the requests of one process."""

    outputs: list[Output]
    begun: list[tuple[str, float]]  # requests that left the queue, and how many seconds they were in it


class Refused(msgspec.Struct, tag=True, array_like=True):
    """The engine does not take a request on, or gives it up before anything of it was sent."""

    request_id: str
    message: str
    param: str | None
    code: str | None
    expired: bool  # it waited for too long
    status: int = 400  # HTTP's, where it is neither that nor `BLOCKS_LOST`


class Alive(msgspec.Struct, tag=True, array_like=True):
    """Sent every second or so, busy or idle."""

    stats: Stats
    late_compiles: int  # steps that the warm-up did not foresee
    late_compile_seconds: float = 0.0
    invariant_violations: int = 0  # times that an idle engine was found to have lost something


ToEngine = Add | Abort | Beat
FromEngine = Starting | Found | Ready | Failed | Stepped | Refused | Alive
