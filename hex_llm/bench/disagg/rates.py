"""What one worker can do: how long its steps take, how much it holds, and how fast pages leave it."""

from dataclasses import dataclass

from hex_llm.errors import ConfigError

# As hex_llm/build.py has them, which cannot be imported without JAX; a test compares.
CHUNKED_STEP_TOKENS = 2048
HANDED_STEP_TOKENS = 1024
WHOLE_STEP_TOKENS = 8192
CHUNKED_PADDING = 128
WHOLE_PADDING = 512
CHUNKED_PREFILLS = 16
WHOLE_PREFILLS = 1


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, all at least 0. A token of a prompt costs more the further back it sees, and less beside decodes, which
    read the weights anyway. No step is shorter than `decode_step`, in which the weights are read once.
    """

    decode_step: float
    decode_sequence: float  # for each sequence
    decode_context: float  # for each token that a sequence has
    prefill_step: float
    prefill_token: float
    prefill_context: float  # for each pair of a prompt's token and one that it sees
    mixed_token: float  # of a prompt, in a step that decodes

    def decode(self, sequences: int, context: int) -> float:
        """A step in which so many sequences get a token each; they have `context` tokens in all."""
        return self.decode_step + self.decode_sequence * sequences + self.decode_context * context

    def prefill(self, tokens: int, seen: float) -> float:
        """A step of prompts alone; their tokens see `seen` others in all."""
        return max(self.decode_step, self.prefill_step + self.prefill_token * tokens + self.prefill_context * seen)

    def mixed(self, sequences: int, context: int, tokens: int, seen: float) -> float:
        return self.decode(sequences, context) + self.mixed_token * tokens + self.prefill_context * seen


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a worker takes on, by the names of the server's flags where there are such."""

    kv_tokens: int  # that the KV cache holds
    max_decode_seqs: int
    step_tokens: int = CHUNKED_STEP_TOKENS  # of a chunked step without decodes
    mixed_tokens: int = CHUNKED_STEP_TOKENS  # of one with decodes
    split_tokens: int | None = None  # of a step in a split; None: as the server has it

    def __post_init__(self) -> None:
        if self.split_tokens is not None and self.split_tokens < self.max_decode_seqs:
            raise ConfigError(
                f"--split_tokens={self.split_tokens} must be at least --max_decode_seqs={self.max_decode_seqs}."
            )
        if not self.max_decode_seqs <= self.mixed_tokens <= self.step_tokens:
            raise ConfigError(
                f"--mixed_tokens={self.mixed_tokens} must be at least --max_decode_seqs={self.max_decode_seqs}, so that"
                f" each of them moves on in every step, and at most --step_tokens={self.step_tokens}."
            )


@dataclass(frozen=True, slots=True)
class Link:
    """What pages travel over: a worker sends, and another takes in, one part after the other."""

    bytes_per_token: float
    bytes_per_second: float

    def seconds(self, tokens: int) -> float:
        return tokens * self.bytes_per_token / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Rates:
    times: Times
    bounds: Bounds
    link: Link


@dataclass(frozen=True, slots=True)
class Steps:
    """How a worker cuts its work into steps."""

    chunked: bool  # a step may both prefill and decode
    tokens: int
    mixed_tokens: int
    padding: int  # the smallest shape of a step with prompts; each of the others is twice the one before
    prefills: int  # prompts that a step works on

    def padded(self, tokens: int) -> int:
        """The tokens that a step computes which has so many."""
        size = self.padding
        while size < tokens:
            size *= 2
        return max(min(size, self.tokens), tokens)


def chunked_steps(bounds: Bounds) -> Steps:
    return Steps(True, bounds.step_tokens, bounds.mixed_tokens, CHUNKED_PADDING, CHUNKED_PREFILLS)


def split_steps(bounds: Bounds) -> Steps:
    """Pages go on step by step, so that the server takes smaller steps where it would take large ones otherwise."""
    tokens = bounds.split_tokens or max(min(bounds.step_tokens, HANDED_STEP_TOKENS), bounds.max_decode_seqs)
    return Steps(True, tokens, min(bounds.mixed_tokens, tokens), CHUNKED_PADDING, CHUNKED_PREFILLS)


def whole_steps(bounds: Bounds) -> Steps:
    """Without --enable_chunked_prefill: a step is for one prompt, or decodes."""
    tokens = max(WHOLE_STEP_TOKENS, bounds.max_decode_seqs)
    return Steps(False, tokens, tokens, WHOLE_PADDING, WHOLE_PREFILLS)
