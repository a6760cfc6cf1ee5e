"""How long a text may be to have a chance of fitting the model's context, found out before all of it is tokenized."""

from dataclasses import dataclass

from hex_llm.errors import ContextTooLong
from hex_llm.text.tokenizer import Tokenizer

# A text that is longer than this many characters for each token of the context is first tried by its beginning, and
# refused where that alone makes this many times the tokens: more than its end could put right.
_HEAD_CHARS = 12
_HEAD_TOKENS = 2


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """`max_chars` is what `max_model_len` of the longest tokens hold."""

    max_model_len: int
    max_chars: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, max_model_len: int) -> "PromptLimit":
        return cls(max_model_len, max_model_len * tokenizer.max_token_chars)

    def check(self, text: str, param: str | None = None) -> None:
        if len(text) > self.max_chars:
            raise ContextTooLong(
                f"The prompt has {len(text)} characters, more than the {self.max_chars} that the model's context of "
                f"{self.max_model_len} tokens can hold.",
                param=param,
            )

    def encode(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool = True, param: str | None = None
    ) -> list[int]:
        """The tokens of a text, which may still be too many, but not many times so."""
        self.check(text, param)
        head = text[: _HEAD_CHARS * self.max_model_len]
        if len(head) < len(text):
            num_tokens = len(tokenizer.encode(head, add_special_tokens=False))
            if num_tokens > _HEAD_TOKENS * self.max_model_len:
                raise ContextTooLong(
                    f"The prompt's first {len(head)} of {len(text)} characters are {num_tokens} tokens; the model's "
                    f"context is {self.max_model_len} tokens.",
                    param=param,
                )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
