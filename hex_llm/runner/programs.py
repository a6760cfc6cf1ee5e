"""The programs a device runs: what each computes, of which shapes, and which of its arguments it takes over.

A step is `Forward` and then `Choose`, with what some requests want beside. They are several, because what that is
differs from step to step, and with the model in it each combination would be minutes of compilation more.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hex_llm.kernels.paged_attention.api import page_width
from hex_llm.kernels.paged_attention.pages import SCALE, packed_width, rounded
from hex_llm.models.adapters import packed_size, write_slot
from hex_llm.models.arch import Arch
from hex_llm.models.split import Split
from hex_llm.parallel.backend import backend
from hex_llm.parallel.mesh import TENSOR
from hex_llm.parallel.sharding import PAGES, VOCABULARY, WHOLE
from hex_llm.runner.buckets import Bucket, Buckets, Variant
from hex_llm.runner.choose import choose, choose_any, process, remember, score
from hex_llm.runner.forward import Computed, forward
from hex_llm.runner.layout import COLUMNS, Layout, Shapes
from hex_llm.runner.logprobs import prompt_logprobs
from hex_llm.runner.pages import Staging, copy_in, copy_out, part_counts, staged_spec
from hex_llm.runner.state import (
    History,
    Slots,
    admit,
    empty_history,
    empty_slots,
    packed_admission_size,
    packed_seat_size,
    seat,
)


@dataclass(frozen=True, slots=True)
class Forward:
    bucket: Bucket
    adapted: bool = False  # some tokens have adapters


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


@dataclass(frozen=True, slots=True)
class Seat:
    """Writes the page table of a request that joins in a step which only decodes."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Writes an adapter to a slot."""


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Copies that many blocks of the KV cache."""

    count: int


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Writes such a copy to other blocks."""

    count: int


type Program = (
    Forward
    | Choose
    | Process
    | Remember
    | Score
    | ChooseAny
    | ScorePrompt
    | Admit
    | Seat
    | LoadAdapter
    | CopyOut
    | CopyIn
)


@dataclass(frozen=True)
class Programs:
    """Everything about an engine's programs but the machine code."""

    arch: Arch
    shapes: Shapes
    params: Any  # their shapes, and how they are spread
    dtype: Any  # of the keys and values
    mesh: Mesh
    transfers: bool = False  # blocks are copied out for other engines, and in
    pairs: Any = None  # of all slots for adapters, their shapes and how they are spread; None: there are no adapters

    @property
    def kv(self) -> tuple[Any, ...]:
        """Of each layer the `Pages`."""
        shapes, split = self.shapes, Split.over(self.arch, self.mesh)
        width = page_width(self.arch.head_dim)
        page = (shapes.num_pages, 2, split.kv_heads * split.num_devices, shapes.page_size, width)
        made = jax.eval_shape(lambda: rounded(jnp.zeros(page, SCALE), self.dtype))
        return (jax.tree.map(lambda each: self._array(each.shape, each.dtype, PAGES), made),) * self.arch.num_layers

    @property
    def slots(self) -> Slots:
        return jax.tree.map(self._same, jax.eval_shape(partial(empty_slots, self.shapes)))

    @property
    def history(self) -> History:
        return jax.tree.map(self._same, jax.eval_shape(partial(empty_history, self.shapes)))

    @property
    def staging(self) -> Staging:
        arch, shapes = self.arch, self.shapes
        width = packed_width(page_width(arch.head_dim), self.dtype)
        block = (arch.num_layers, 2, arch.num_kv_heads, shapes.page_size, width)
        block_bytes = math.prod(block) * jnp.dtype(self.dtype).itemsize
        counts = part_counts(block_bytes, -(-shapes.max_model_len // shapes.page_size)) if self.transfers else ()
        return Staging(counts, block, self.dtype, NamedSharding(self.mesh, staged_spec(Split.over(arch, self.mesh))))

    @property
    def is_split(self) -> bool:
        """Whether several devices share the work."""
        return self.mesh.size > 1

    def function(self, program: Program) -> Callable:
        """What a program computes; where devices share the work, each on its share of the arrays."""
        function = self.own_function(program)
        if not self.is_split:
            return function
        arguments, _ = self.arguments(program)
        specs = jax.tree.map(lambda array: array.sharding.spec, arguments)
        results = self._results(program)
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=False)

    def own_function(self, program: Program) -> Callable:
        """What each device computes."""
        vocab_size = self.arch.vocab_size
        match program:
            case Forward(bucket, _):
                return partial(forward, arch=self.arch, layout=Layout(bucket, self.shapes))
            case Choose(_, variant):
                return partial(choose, variant=variant, vocab_size=vocab_size)
            case Process():
                return partial(process, vocab_size=vocab_size)
            case Remember():
                return remember
            case Score():
                return partial(score, vocab_size=vocab_size)
            case ChooseAny():
                return partial(choose_any, vocab_size=vocab_size)
            case ScorePrompt():
                return partial(prompt_logprobs, arch=self.arch)
            case Admit():
                return admit
            case Seat():
                return seat
            case LoadAdapter():
                return write_slot
            case CopyOut():
                return partial(copy_out, split=Split.over(self.arch, self.mesh))
            case CopyIn():
                return partial(copy_in, split=Split.over(self.arch, self.mesh))

    def _results(self, program: Program) -> Any:
        """How they are spread: prefixes of their trees."""
        match program:
            case Forward(bucket, _):
                computed: Any = (VOCABULARY, WHOLE, None if bucket.decode else WHOLE)
                return PAGES, WHOLE, Computed(*computed)
            case Process():
                return VOCABULARY
            case LoadAdapter():
                return jax.tree.map(lambda array: array.sharding.spec, self.pairs)
            case CopyOut():
                return staged_spec(Split.over(self.arch, self.mesh))
            case CopyIn():
                return PAGES
            case _:
                return WHOLE

    def arguments(self, program: Program) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Their shapes, and the places of those that are donated."""
        match program:
            case Forward(bucket, adapted):
                arguments = (self.params, self.kv, self.slots, self._words(Layout(bucket, self.shapes).size))
                return (*arguments, self.pairs) if adapted else arguments, (1, 2)
            case Choose(rows, _):
                return (self.slots, self._logits(rows), self._words(rows, len(COLUMNS))), (0,)
            case Process(rows):
                return (self.history, self._logits(rows), self._words(rows, len(COLUMNS))), ()
            case Remember(rows):
                return (self.history, self._words(rows, len(COLUMNS)), self._words(rows)), (0,)
            case Score(rows):
                return (self._logits(rows), self._words(rows)), ()
            case ChooseAny(rows):
                return (self.slots, self.history, self._logits(rows), self._words(rows, len(COLUMNS))), (0, 1)
            case ScorePrompt(tokens):
                hidden = self._array((tokens, self.arch.embed_size), self.params.embed.dtype)
                return (self.params, hidden, self._words(tokens + 1)), ()
            case Admit():
                return (self.history, self._words(packed_admission_size(self.shapes))), (0,)
            case Seat():
                return (self.slots, self._words(packed_seat_size(self.shapes))), (0,)
            case LoadAdapter():
                return (self.pairs, self.adapter, self._words()), (0,)
            case CopyOut(count):
                return (self.kv, self._words(count)), ()
            case CopyIn(count):
                return (self.kv, self.staged(count), self._words(count)), (0,)

    @property
    def adapter(self) -> jax.ShapeDtypeStruct:
        """One that is loaded, as `loader.adapters.pack_adapter` makes it."""
        return self._array((self.mesh.size, packed_size(self.pairs)), self.params.embed.dtype, PartitionSpec(TENSOR))

    def staged(self, count: int) -> jax.ShapeDtypeStruct:
        """A copy of so many blocks."""
        spec = staged_spec(Split.over(self.arch, self.mesh))
        return self._array(self.staging.shape(count), self.dtype, spec)

    def _logits(self, rows: int) -> jax.ShapeDtypeStruct:
        split = Split.over(self.arch, self.mesh)
        return self._array((rows, split.size("vocab")), jnp.float32, VOCABULARY)

    def _words(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._array(shape, jnp.int32)

    def _same(self, array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The same on every device."""
        return self._array(array.shape, array.dtype)

    def _array(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = WHOLE) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, spec) if self.is_split or self._is_elsewhere() else None
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def _is_elsewhere(self) -> bool:
        """Whether the one device is not that which JAX takes where nobody says."""
        return backend() != jax.default_backend() or self.mesh.devices.flat[0] != jax.devices()[0]


def all_programs(buckets: Buckets, counts: Sequence[int] = (), *, adapters: bool = False) -> Iterator[Program]:
    """Those that can come to be needed, the slowest to compile first. `counts`: of blocks that are copied at once."""
    for bucket in sorted(buckets, key=lambda bucket: -bucket.tokens):
        yield from forward_programs(bucket, adapters=adapters)
    for rows in sorted({bucket.rows for bucket in buckets}, reverse=True):
        yield from choosing_programs(rows, buckets.variants)
    for bucket in buckets:
        if not bucket.decode:
            yield ScorePrompt(bucket.tokens)
    yield Admit()
    yield Seat()
    if adapters:
        yield LoadAdapter()
    for count in counts:
        yield from copying_programs(count)


def forward_programs(bucket: Bucket, *, adapters: bool) -> list[Program]:
    """Steps in which no token has an adapter do without."""
    return [Forward(bucket), Forward(bucket, adapted=True)] if adapters else [Forward(bucket)]


def copying_programs(count: int) -> list[Program]:
    return [CopyOut(count), CopyIn(count)]


def choosing_programs(rows: int, variants: Sequence[Variant]) -> list[Program]:
    if Variant.ANY in variants:
        return [ChooseAny(rows)]
    choices = [Choose(rows, variant) for variant in variants if variant <= Variant.FILTERED]
    return [*choices, Process(rows), Remember(rows), Score(rows)]


def name_of(program: Program) -> str:
    """For profiles and compiler messages."""
    match program:
        case Forward(bucket, adapted):
            return f"forward_{'decode' if bucket.decode else 'mixed'}_{bucket.tokens}{'_adapted' * adapted}"
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
        case Seat():
            return "seat"
        case LoadAdapter():
            return "load_adapter"
        case CopyOut(count):
            return f"copy_out_{count}"
        case CopyIn(count):
            return f"copy_in_{count}"
