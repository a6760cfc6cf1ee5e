"""How much the server takes on at a time. What is more is refused at once, while the answer is still cheap."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hex_llm.errors import Overloaded


@dataclass(slots=True)
class Ticket:
    """A request's part of what is under way."""

    sequences: int
    tokens: int = 0


class Admission:
    """Counts sequences and tokens of prompts under way in this process."""

    def __init__(self, max_sequences: int, max_tokens: int):
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.sequences = 0
        self.tokens = 0

    @contextmanager
    def enter(self, sequences: int) -> Iterator[Ticket]:
        # One request alone is never too many.
        if self.sequences and self.sequences + sequences > self.max_sequences:
            raise Overloaded(
                f"{self.sequences} sequences run or wait, and the request asks for {sequences} more; there may be "
                f"{self.max_sequences}. Try again in a moment."
            )
        ticket = Ticket(sequences)
        self.sequences += sequences
        try:
            yield ticket
        finally:
            self.sequences -= ticket.sequences
            self.tokens -= ticket.tokens

    def add_tokens(self, ticket: Ticket, tokens: int) -> None:
        if self.tokens and self.tokens + tokens > self.max_tokens:
            raise Overloaded(
                f"Prompts of {self.tokens} tokens are under way, and the request has {tokens} more; there may be "
                f"{self.max_tokens}. Try again in a moment."
            )
        ticket.tokens += tokens
        self.tokens += tokens
