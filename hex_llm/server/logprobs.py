"""Log-probabilities as clients get them: OpenAI's two shapes, and vLLM's for those of a prompt."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hex_llm.engine.request import TokenLogprobs
from hex_llm.text.tokenizer import Joining, Tokenizer

LOWEST = -9999.0  # OpenAI's number for what is next to impossible; JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenNames:
    """What a token is called: its text, or where its bytes are no whole characters, these as \\xf0\\x9f."""

    tokenizer: Tokenizer
    as_ids: bool = False
    before_bytes: str = ""

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.text(token)

    def text(self, token: int) -> str:
        spelled = self.tokenizer.token_bytes(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return self.before_bytes + "".join(f"\\x{byte:02x}" for byte in spelled)


class TextOffsets:
    """Where each token of a text begins in it, in characters. One token after the other is asked for."""

    def __init__(self, tokenizer: Tokenizer, *, start: int = 0, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = start
        self._at_start = True

    def place(self, token: int) -> int:
        here = self._position
        if token not in self._skipped:
            self._position += self._length(token)
            self._at_start = False
        return here

    def _length(self, token: int) -> int:
        tokenizer = self._tokenizer
        # Decoders of pieces leave out the space before the first word of a text.
        if self._at_start and tokenizer.joining is not Joining.BYTES and tokenizer.byte_token(token) is None:
            return len(tokenizer.decode([token], skip_special_tokens=False))
        return len(self._decoder.decode(tokenizer.token_bytes(token)))


def chat_logprobs(names: TokenNames, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_entry(names, token, entry.logprob),
                "top_logprobs": [_chat_entry(names, *top) for top in entry.top],
            }
            for token, entry in zip(tokens, logprobs, strict=True)
        ],
        "refusal": None,
    }


def completion_logprobs(
    names: TokenNames,
    offsets: TextOffsets,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    num_alternatives: int,
) -> dict[str, list[Any]]:
    """None stands for the first token of a prompt, which nothing comes before."""
    return {
        "tokens": [names.name(token) for token in tokens],
        "token_logprobs": [entry and _finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [
            entry and _alternatives(names, token, entry, num_alternatives)
            for token, entry in zip(tokens, logprobs, strict=True)
        ],
        "text_offset": [offsets.place(token) for token in tokens],
    }


def prompt_logprobs(
    names: TokenNames, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], num_alternatives: int
) -> list[dict[str, Any] | None]:
    """For each token of a prompt, itself and its alternatives by their ids."""
    shown: list[dict[str, Any] | None] = []
    for token, entry in zip(tokens, logprobs, strict=True):
        if entry is None:
            shown.append(None)
            continue
        ranked = [(token, entry.logprob, entry.rank)]
        ranked += [(other, logprob, rank) for rank, (other, logprob) in enumerate(entry.top[:num_alternatives], 1)]
        shown.append(
            {
                str(each): {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(each)}
                for each, logprob, rank in ranked
            }
        )
    return shown


def _chat_entry(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    spelled = names.tokenizer.token_bytes(token)
    return {"token": names.name(token), "logprob": _finite(logprob), "bytes": list(spelled)}


def _alternatives(names: TokenNames, token: int, entry: TokenLogprobs, most: int) -> dict[str, float]:
    """The likeliest tokens, and the chosen one even where it is not among them."""
    found = {names.name(other): _finite(logprob) for other, logprob in entry.top[:most]}
    found.setdefault(names.name(token), _finite(entry.logprob))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
