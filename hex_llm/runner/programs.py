"""The programs a device runs: what each computes, of which shapes, and which of its arguments it takes over.

A step is `Forward` and then `Choose`, with what some requests want beside. They are several, because what that is
differs from step to step, and with the model in it each combination would be minutes of compilation more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hex_llm.models.arch import Arch
from hex_llm.runner.buckets import Bucket, Buckets, Variant
from hex_llm.runner.choose import choose, choose_any, process, remember, score
from hex_llm.runner.forward import forward
from hex_llm.runner.layout import COLUMNS, Layout, Shapes
from hex_llm.runner.logprobs import prompt_logprobs
from hex_llm.runner.state import History, Slots, admit, empty_history, empty_slots, packed_admission_size


@dataclass(frozen=True, slots=True)
class Forward:
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class Choose:
    """Each row's token, by a variant up to FILTERED."""

    rows: int
    variant: Variant


@dataclass(frozen=True, slots=True)
class Process:
    """What RULED does to the logits before."""

    rows: int


@dataclass(frozen=True, slots=True)
class Remember:
    """What RULED keeps afterwards."""

    rows: int


@dataclass(frozen=True, slots=True)
class Score:
    """What SCORED tells of the tokens."""

    rows: int


@dataclass(frozen=True, slots=True)
class ChooseAny:
    """All of that in one."""

    rows: int


@dataclass(frozen=True, slots=True)
class ScorePrompt:
    """The log-probabilities of a step's prompt tokens."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Writes down what is special about a request that gets a slot."""


type Program = Forward | Choose | Process | Remember | Score | ChooseAny | ScorePrompt | Admit


@dataclass(frozen=True)
class Programs:
    """Everything about an engine's programs but the machine code."""

    arch: Arch
    shapes: Shapes
    params: Any  # their shapes
    dtype: Any  # of the keys and values

    @property
    def kv(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        shapes, arch = self.shapes, self.arch
        page = (shapes.num_pages, 2, arch.num_kv_heads, shapes.page_size, arch.head_dim)
        return (jax.ShapeDtypeStruct(page, self.dtype),) * arch.num_layers

    @property
    def slots(self) -> Slots:
        return jax.eval_shape(partial(empty_slots, self.shapes))

    @property
    def history(self) -> History:
        return jax.eval_shape(partial(empty_history, self.shapes))

    def function(self, program: Program) -> Callable:
        match program:
            case Forward(bucket):
                return partial(forward, arch=self.arch, layout=Layout(bucket, self.shapes))
            case Choose(_, variant):
                return partial(choose, variant=variant)
            case Process():
                return process
            case Remember():
                return remember
            case Score():
                return score
            case ChooseAny():
                return choose_any
            case ScorePrompt():
                return partial(prompt_logprobs, arch=self.arch)
            case Admit():
                return admit

    def arguments(self, program: Program) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Their shapes, and the places of those that are donated."""
        match program:
            case Forward(bucket):
                return (self.params, self.kv, self.slots, _words(Layout(bucket, self.shapes).size)), (1, 2)
            case Choose(rows, _):
                return (self.slots, self._logits(rows), _words(rows, len(COLUMNS))), (0,)
            case Process(rows):
                return (self.history, self._logits(rows), _words(rows, len(COLUMNS))), ()
            case Remember(rows):
                return (self.history, _words(rows, len(COLUMNS)), _words(rows)), (0,)
            case Score(rows):
                return (self._logits(rows), _words(rows)), ()
            case ChooseAny(rows):
                return (self.slots, self.history, self._logits(rows), _words(rows, len(COLUMNS))), (0, 1)
            case ScorePrompt(tokens):
                hidden = jax.ShapeDtypeStruct((tokens, self.arch.embed_size), self.params.embed.dtype)
                return (self.params, hidden, _words(tokens + 1)), ()
            case Admit():
                return (self.history, _words(packed_admission_size(self.shapes))), (0,)

    def _logits(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.arch.vocab_size), jnp.float32)


def all_programs(buckets: Buckets) -> Iterator[Program]:
    """Those that steps can come to need, the slowest to compile first."""
    for bucket in sorted(buckets, key=lambda bucket: -bucket.tokens):
        yield Forward(bucket)
    for rows in sorted({bucket.rows for bucket in buckets}, reverse=True):
        yield from choosing_programs(rows, buckets.variants)
    for bucket in buckets:
        if not bucket.decode:
            yield ScorePrompt(bucket.tokens)
    yield Admit()


def choosing_programs(rows: int, variants: Sequence[Variant]) -> list[Program]:
    if Variant.ANY in variants:
        return [ChooseAny(rows)]
    choices = [Choose(rows, variant) for variant in variants if variant <= Variant.FILTERED]
    return [*choices, Process(rows), Remember(rows), Score(rows)]


def _words(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def name_of(program: Program) -> str:
    """For profiles and compiler messages."""
    match program:
        case Forward(bucket):
            return f"forward_{'decode' if bucket.decode else 'mixed'}_{bucket.tokens}"
        case Choose(rows, variant):
            return f"choose_{variant.name.lower()}_{rows}"
        case Process(rows):
            return f"choose_after_rules_{rows}"
        case Remember(rows):
            return f"choose_and_remember_{rows}"
        case Score(rows):
            return f"choose_and_score_{rows}"
        case ChooseAny(rows):
            return f"choose_any_{rows}"
        case ScorePrompt(tokens):
            return f"score_prompt_{tokens}"
        case Admit():
            return "admit"
