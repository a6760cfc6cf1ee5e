"""The shapes steps are padded to. Iterating them is the warm-up, so padding cannot leave the compiled set."""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


class Variant(enum.IntEnum):
    """What a step can do beyond choosing tokens. A step takes the least variant that does for all of its requests."""

    PLAIN = 0  # temperature, top_k, top_p, min_p
    FULL = 1  # also penalties, logit_bias, bad_words, min_tokens and logprobs
    PROMPT = 2  # also the log-probabilities of prompt tokens
    ANY = 3  # all of this, but the step looks at run time for what it is asked and leaves the rest


@dataclass(frozen=True, slots=True)
class Bucket:
    """A compiled step: `tokens` in all, of `seqs` sequences; `decode` where each has exactly one."""

    tokens: int
    seqs: int
    decode: bool
    variant: Variant


# The variants that are compiled, each with the factor from one bucket of its ladder to the next.
type Growth = Mapping[Variant, int]

# The rarer variants have fewer buckets on their ladders: a few of their steps pad more, all starts compile less.
FINE: Growth = {Variant.PLAIN: 2, Variant.FULL: 8, Variant.PROMPT: 8}
# For devices that compile slowly and branch at no cost; and for small models on them, which pad at little cost.
FUSED: Growth = {Variant.ANY: 2}
COARSE: Growth = {Variant.ANY: 8}


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ladders of buckets: powers of a factor times a padding, up to what a step can hold."""

    decode_padding: int
    max_decodes: int
    mixed_padding: int
    max_mixed_tokens: int
    max_mixed_seqs: int
    growth: Growth = field(default_factory=lambda: FINE)

    def choose(self, tokens: int, *, decode: bool, variant: Variant) -> Bucket:
        """The smallest bucket that holds so many tokens, of the least variant that will do."""
        compiled = min(each for each in self._variants(decode) if each >= variant)
        return next(b for b in self._ladder(decode, compiled) if b.tokens >= tokens)

    def __iter__(self) -> Iterator[Bucket]:
        for decode in (True, False):
            for variant in self._variants(decode):
                yield from self._ladder(decode, variant)

    def largest(self) -> list[Bucket]:
        """The buckets whose temporaries no other's exceed."""
        return [list(self._ladder(decode, max(self._variants(decode))))[-1] for decode in (True, False)]

    def _variants(self, decode: bool) -> list[Variant]:
        # A decode has no prompt tokens.
        return [variant for variant in self.growth if not (decode and variant == Variant.PROMPT)]

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
            size *= self.growth[variant]
