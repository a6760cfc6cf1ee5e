"""What one request of a benchmark asks for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    content: str | tuple[int, ...]  # a text, or token ids
    input_tokens: int | None  # None where only the server can tell
    output_tokens: int  # at most; exactly, where end tokens are ignored
