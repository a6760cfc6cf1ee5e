"""A request: what was asked for, and how far it has come."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hex_llm.engine.sampling import SamplingParams


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the model produced no usable number
    HANDED_OVER = "handed_over"  # to another engine, which goes on with it; no client sees this one


class TokenLogprobs(NamedTuple):
    """What the model thought of one token, and of the likeliest in its place."""

    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...]  # token and log-probability, likeliest first


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One sequence being generated.

    `num_computed` counts the tokens whose keys and values are in `blocks` (or were, until nothing could see them any
    more), or will be when the steps under way have run. It runs behind `num_tokens`, and a step closes some of the
    gap: a prompt is a wide gap, a decode a gap of one. There is no other phase or state. `num_in_flight` tokens were
    sampled on the device and not read yet: they count, but their values are known to the device alone.

    One that comes with `output` was begun by another engine: it goes on from there, as after a preemption.

    One that `hands_over` ends with its next token, and its blocks are kept for the engine that goes on with it. There,
    it has the first engine's address as its `source`, and waits for blocks and token to come from it.
    """

    id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    max_output: int  # tokens, once max_tokens has met the context's end
    stop_ids: frozenset[int] = frozenset()  # end tokens and stop tokens: sampled, they finish the request
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0  # what the random numbers depend on, with the position; 32 bits
    adapter: str = ""  # what it is known by: the same for the same weights, and no others; empty: the model alone
    adapter_source: str = ""  # where an engine that lacks it finds it
    caller: str = ""  # whose request it is, as far as callers are told apart
    cache_salt: str = ""
    hands_over: bool = False
    source: str = ""

    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_in_flight: int = 0
    blocks: list[int] = field(default_factory=list)
    num_freed: int = 0  # of its first blocks: no token still to be planned sees them, and they are no longer its own
    slot: int = -1  # its row of the device's state, while it runs
    adapter_slot: int = 0  # its adapter's place on the device, while it runs; 0 without one
    is_seated: bool = False  # the device knows who has the slot
    is_coming: bool = False  # it has blocks and a slot, and what is to be in the blocks is on its way
    num_cached: int = 0  # tokens of the prompt found in the prefix cache, as reported
    number: int = 0  # as they came to the scheduler
    has_begun: bool = False  # it runs, or has run
    num_preemptions: int = 0  # times that its memory was taken away for others
    last_step: int = 0  # when it was put back: the number of the last step that may hold a slice of it
    keys: list[bytes] = field(default_factory=list)  # of its full blocks, for the prefix cache
    is_long: bool = False  # computed as a sequence above the rope's switch
    # Of the prompt's tokens, as far as they are known; nothing comes before the first.
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    finish_reason: FinishReason | None = None

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_tokens(self) -> int:
        return self.num_known + self.num_in_flight

    @property
    def num_pending(self) -> int:
        """How many tokens are left to compute: none once the last token wanted has been sampled, and none here while
        another engine computes them.
        """
        if self.is_coming or len(self.output) + self.num_in_flight >= self.max_output:
            return 0
        return len(self.prompt) + len(self.output) + self.num_in_flight - self.num_computed

    def tokens(self, start: int, stop: int) -> list[int]:
        """The known tokens from `start` to `stop`."""
        prompt = len(self.prompt)
        if start >= prompt:
            return self.output[start - prompt : stop - prompt]
        return [*self.prompt[start:stop], *self.output[: max(stop - prompt, 0)]]
