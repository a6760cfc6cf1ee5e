"""What crosses between the engine and the device: a step to run, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from hex_llm.engine.request import Request


class Slice(NamedTuple):
    """`length` tokens of a request, from `start` on, to compute in a step.

    The tokens are `request.tokens(start, start + length)`. Where that ends one short, the last token was sampled
    by the step before and only the device knows it; such a slice is always one token long.
    """

    request: Request
    start: int
    length: int
    samples: bool  # it reaches the last token, so that the step yields the next one
    fresh: bool  # the request has just been given its slot, and the device knows nothing of it yet
    num_old_blocks: int  # how many of request.blocks the device's page table has (0 when fresh)

    @property
    def decodes(self) -> bool:
        """Whether it moves a request that the device knows on by one token."""
        return self.length == 1 and not self.fresh


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of one token per row: its own, its rank (1 is the likeliest), and the likeliest `k`."""

    own: np.ndarray  # [rows] float32
    rank: np.ndarray  # [rows] int32
    top_ids: np.ndarray  # [rows, k] int32
    top: np.ndarray  # [rows, k] float32


@dataclass(frozen=True, slots=True)
class StepResult:
    """One row per slice, in the order of the step; a row that did not sample means nothing."""

    tokens: np.ndarray  # [rows] int32
    finite: np.ndarray  # [rows] bool: False where the logits held NaN, or nothing but -inf
    logprobs: Logprobs | None = None  # where a request of the step asked for them
    # For each slice whose request wants them, else None: entry i is about the token at `start + i + 1`.
    prompt_logprobs: Sequence[Logprobs | None] | None = None


class PendingStep(Protocol):
    """A step on its way through the device."""

    def is_done(self) -> bool:
        """Whether there is nothing to wait for."""
        ...

    def read(self) -> StepResult:
        """Waits for the step to end. Interrupted, it can be called again."""
        ...


class OutOfDeviceMemory(Exception):
    """A step did not get the memory that it needs. What the device had of requests may be gone with it."""


class Runner(Protocol):
    """Computes steps, in the order in which they are handed over. Handing one over and reading it may fail with
    OutOfDeviceMemory; then the steps under way are lost, and `reset` comes before the next.
    """

    def dispatch(self, step: Sequence[Slice]) -> PendingStep:
        """Starts a step and returns at once. Everything needed is read from the requests before it returns.

        Slices that decode come first, then fresh ones of one token, then the longer ones.
        """
        ...

    def reset(self) -> None:
        """Has the device know of no request, as when it was new. Adapters stay where they are."""
        ...


class Spoiler(Protocol):
    """What a runner can do beside, in the same order, for those who look for reads of what nobody wrote."""

    def spoil(self, blocks: Sequence[int]) -> None:
        """Has blocks hold NaN from the next step on."""
        ...


class Loader(Protocol):
    """What the runner of an engine that has adapters can do beside, in the same order."""

    def load_adapter(self, slot: int, staged: Any) -> None:
        """Has a slot, one of 1 to `Limits.num_adapters`, hold another adapter from the next step on. It waits for
        nothing but the one before, if that is not in its slot yet. `staged` is as its carrier made it.
        """
        ...


class Copier(Protocol):
    """What the runner of an engine that hands requests over can do beside, in the same order."""

    @property
    def part_blocks(self) -> int:
        """The most blocks that `copy_out` and `copy_in` take at a time."""
        ...

    def copy_out(self, blocks: Sequence[int]) -> Any:
        """Starts to copy blocks as all steps handed over so far leave them, and returns the copy at once."""
        ...

    def copy_in(self, blocks: Sequence[int], pages: Any) -> None:
        """Has blocks hold, from the next step on, what `copy_out` of an engine of the same model made of as many."""
        ...
