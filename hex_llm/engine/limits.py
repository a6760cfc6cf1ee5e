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

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_model_len", "block_size", "max_running", "max_prefills", "prefix_unit"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
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
        return min(self.max_model_len, self.kv_tokens)
