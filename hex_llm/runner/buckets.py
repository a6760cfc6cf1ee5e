"""The shapes steps are padded to. Iterating them is the warm-up, so padding cannot leave the compiled set."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class Variant(enum.IntEnum):
    """What choosing a step's tokens has to do. A step takes the least variant that does for all of its requests."""

    GREEDY = 0  # the likeliest token
    DRAWN = 1  # or a draw by temperature
    FILTERED = 2  # also top_k, top_p and min_p
    RULED = 3  # also penalties, logit_bias, bad_words and min_tokens
    SCORED = 4  # also logprobs
    ANY = 5  # all of this, but it looks at run time for what it is asked and leaves the rest


@dataclass(frozen=True, slots=True)
class Bucket:
    """A compiled shape: `tokens` in all, of `seqs` sequences; `decode` where each has exactly one.

    A token is chosen for each of `rows`, which may be more, so that there are fewer programs that choose.
    """

    tokens: int
    seqs: int
    rows: int
    decode: bool


# A branch at run time costs a CPU nothing, and compiling costs it much. On other devices the host would wait for it.
SEPARATE = tuple(each for each in Variant if each != Variant.ANY)
TOGETHER = (Variant.ANY,)


# Rows up to which spare ones cost hardly anything: a head's weights take longer to read than to multiply with.
FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ladders of buckets: powers of a factor times a padding, up to what a step can hold."""

    decode_padding: int
    max_decodes: int
    mixed_padding: int
    max_mixed_tokens: int
    max_mixed_seqs: int
    growth: int = 2  # from one bucket to the next
    row_growth: int = 2  # from one number of rows to the next, while they are few
    single: bool = False  # there is a bucket for one decode alone
    variants: tuple[Variant, ...] = SEPARATE  # that are compiled

    def choose(self, tokens: int, *, decode: bool) -> Bucket:
        """The smallest bucket that holds so many tokens."""
        return next(bucket for bucket in self._ladder(decode) if bucket.tokens >= tokens)

    def variant(self, wanted: Variant) -> Variant:
        """The least compiled variant that will do."""
        return min(each for each in self.variants if each >= wanted)

    def __iter__(self) -> Iterator[Bucket]:
        for decode in (True, False):
            yield from self._ladder(decode)

    def largest(self) -> list[Bucket]:
        """The buckets whose temporaries no other's exceed."""
        return [list(self._ladder(decode))[-1] for decode in (True, False)]

    def _ladder(self, decode: bool) -> Iterator[Bucket]:
        padding, limit = (
            (self.decode_padding, self.max_decodes) if decode else (self.mixed_padding, self.max_mixed_tokens)
        )
        if decode and self.single and padding > 1:
            yield Bucket(1, 1, self._rows(1), True)
        top = -(-limit // padding) * padding
        size = padding
        while True:
            size = min(size, top)
            seqs = size if decode else min(self.max_mixed_seqs, size)
            yield Bucket(size, seqs, self._rows(seqs), decode)
            if size == top:
                return
            size *= self.growth

    def _rows(self, seqs: int) -> int:
        if self.row_growth <= self.growth:
            return seqs
        most = max(-(-self.max_decodes // self.decode_padding) * self.decode_padding, self.max_mixed_seqs)
        rows = self.decode_padding
        while rows < seqs:
            rows *= self.row_growth if rows < FEW_ROWS else self.growth
        return min(rows, most)
