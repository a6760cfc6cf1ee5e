"""How much the engine takes on: of one request, and in one step."""

from dataclasses import dataclass

from hex_llm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    vocab_size: int
    max_model_len: int  # tokens of a request, prompt and output
    num_blocks: int  # of KV cache; block 0 is nobody's: what is computed for padding goes there
    block_size: int  # tokens in a block
    max_running: int  # requests that run at once; each has a slot of the device's state
    max_prefills: int  # slices of a step that do more than decode
    step_tokens: int  # tokens of a step
    mixed_tokens: int | None = None  # of one that also decodes, where those shall not wait as long
    chunked: bool = False  # a step may both prefill and decode
    prefix_caching: bool = False
    prefix_unit: int = 1  # prefix hits are reported in multiples of it
    reach: int | None = None  # how many of the last tokens, itself among them, a token sees in any layer; None: all
    rope_switch: int | None = None  # tokens above which a sequence is rotated otherwise; None: never
    num_adapters: int = 0  # on the device at once; with 0, no request may name one

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_model_len", "block_size", "max_running", "max_prefills", "prefix_unit"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.reach is not None and self.reach < 2:  # or a prefix would count as found that nobody has computed
            raise ConfigError(f"reach={self.reach} must be at least 2.")
        if self.num_adapters < 0:
            raise ConfigError(f"num_adapters={self.num_adapters} must be at least 0.")
        if self.num_blocks < 2:
            raise ConfigError(f"num_blocks={self.num_blocks} must be at least 2: block 0 is never given out.")
        # So that every running request moves on in every step, a prefill by one token at least.
        smallest = self.step_tokens if self.mixed_tokens is None else self.mixed_tokens
        if self.step_tokens < smallest:
            raise ConfigError(f"mixed_tokens={smallest} is more than the {self.step_tokens} tokens of a step.")
        if smallest < self.max_running:
            raise ConfigError(
                f"A step of {smallest} tokens is too small for {self.max_running} running requests: "
                "each of them needs one."
            )

    @property
    def kv_tokens(self) -> int:
        """How many tokens the KV cache holds."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def context(self) -> int:
        """The most tokens a request can have."""
        return self.max_model_len if self.most_blocks < self.num_blocks else min(self.max_model_len, self.kv_tokens)

    @property
    def most_blocks(self) -> int:
        """The most blocks that a request needs at once."""
        return most_blocks(self.max_model_len, self.block_size, reach=self.reach, step_tokens=self.step_tokens)

    @property
    def reach_blocks(self) -> int | None:
        """How many full blocks the first token after them sees into; None: all there are."""
        return None if self.reach is None else -(-(self.reach - 1) // self.block_size)

    def first_block(self, position: int) -> int:
        """The first block that a token at `position` sees into; so those after it see none before."""
        return 0 if self.reach is None else max(position - (self.reach - 1), 0) // self.block_size


def most_blocks(max_model_len: int, block_size: int, *, reach: int | None, step_tokens: int) -> int:
    """The blocks of the longest request; of one that gives back what is out of reach, of what a step's tokens see."""
    whole = -(-max_model_len // block_size)
    if reach is None:
        return whole
    seen = reach - 1 + step_tokens
    return min(whole, (seen - 1 + block_size - 1) // block_size + 1)  # where they begin at a block's last token
