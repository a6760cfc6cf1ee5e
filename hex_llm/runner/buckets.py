"""The shapes steps are padded to. Iterating them is the warm-up, so padding cannot leave the compiled set."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class Variant(enum.IntEnum):
    """What a step does beyond choosing tokens. A step takes the least variant that does for all of its requests."""

    PLAIN = 0  # temperature, top_k, top_p, min_p
    FULL = 1  # also penalties, logit_bias, bad_words, min_tokens and logprobs
    PROMPT = 2  # also the log-probabilities of prompt tokens


@dataclass(frozen=True, slots=True)
class Bucket:
    """A compiled step: `tokens` in all, of `seqs` sequences; `decode` where each has exactly one."""

    tokens: int
    seqs: int
    decode: bool
    variant: Variant


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ladders of buckets: powers of two times a padding, up to what a step can hold.

    The rarer variants have fewer steps on their ladders: a few of their steps pad more, all starts compile less.
    """

    decode_padding: int
    max_decodes: int
    mixed_padding: int
    max_mixed_tokens: int
    max_mixed_seqs: int

    def choose(self, tokens: int, *, decode: bool, variant: Variant) -> Bucket:
        """The smallest bucket that holds so many tokens."""
        return next(b for b in self._ladder(decode, variant) if b.tokens >= tokens)

    def __iter__(self) -> Iterator[Bucket]:
        for variant in Variant:
            if variant != Variant.PROMPT:  # a decode has no prompt tokens
                yield from self._ladder(True, variant)
            yield from self._ladder(False, variant)

    def largest(self) -> list[Bucket]:
        """The buckets whose temporaries no other's exceed."""
        return [max(self._ladder(decode, variant), key=lambda b: b.tokens)
                for decode, variant in ((True, Variant.FULL), (False, Variant.PROMPT))]  # fmt: skip

    def _ladder(self, decode: bool, variant: Variant) -> Iterator[Bucket]:
        padding, limit = (
            (self.decode_padding, self.max_decodes) if decode else (self.mixed_padding, self.max_mixed_tokens)
        )
        top = -(-limit // padding) * padding
        size = padding
        while True:
            size = min(size, top)
            seqs = size if decode else min(self.max_mixed_seqs, size)
            yield Bucket(size, seqs, decode, variant)
            if size == top:
                return
            size *= 2 if variant == Variant.PLAIN else 8
