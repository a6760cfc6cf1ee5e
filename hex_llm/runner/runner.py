"""The door to the device: steps in, tokens out."""

from collections.abc import Buffer, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hex_llm.engine.step import Logprobs, OutOfDeviceMemory, Slice, StepResult
from hex_llm.kernels.paged_attention.pages import Pages
from hex_llm.parallel.hosts import put_rows, ranks_of_devices
from hex_llm.runner.buckets import Bucket, Buckets, Variant
from hex_llm.runner.compiler import Compiler
from hex_llm.runner.device_memory import asking, reach
from hex_llm.runner.followers import Followers
from hex_llm.runner.forward import Computed
from hex_llm.runner.layout import Layout
from hex_llm.runner.pack import Packer, wants_prompt_logprobs
from hex_llm.runner.packed_adapter import PackedAdapter
from hex_llm.runner.packed_step import PackedStep
from hex_llm.runner.pages import Staging, places_to_read, places_to_write
from hex_llm.runner.programs import (
    Admit,
    Choose,
    ChooseAny,
    CopyIn,
    CopyOut,
    Forward,
    LoadAdapter,
    Process,
    Remember,
    Score,
    ScorePrompt,
    Seat,
)
from hex_llm.runner.state import (
    History,
    Slots,
    empty_history,
    empty_slots,
    packed_admission_size,
    packed_seat_size,
)


class DeviceRunner:
    """Runs steps in the order they come. The KV cache and what is known of the slots live on the device, and each step
    takes them over from the one before (they are donated), so that nothing is copied."""

    def __init__(self, params: Any, buckets: Buckets, compiler: Compiler, followers: Followers | None = None):
        """`followers` are told of each step before it is run."""
        self._followers = followers
        self._params = params
        self._compiler = compiler
        programs = compiler.programs
        self._shapes = programs.shapes
        self.staging: Staging = programs.staging
        self._packer = Packer(programs.shapes, buckets)
        self._kv: tuple[Pages, ...]
        self._slots: Slots
        self._history: History
        self._make_empty()
        self._pairs = _zeros(programs.pairs)
        self._ranks = ranks_of_devices(programs.mesh) if self._pairs is not None else []

    def dispatch(self, step: Sequence[Slice]) -> "PendingOutput":
        packed = self._packer.pack(step)
        if self._followers is not None:
            self._followers.send(packed)
        with asking(OutOfDeviceMemory):
            return PendingOutput(step, *self.run(packed))

    def reset(self) -> None:
        assert self._followers is None, "other hosts are not told"
        for array in jax.tree.leaves((self._kv, self._slots, self._history)):
            if not array.is_deleted():
                array.delete()  # there is no room for two
        with asking(OutOfDeviceMemory):
            self._make_empty()

    def spoil(self, blocks: Sequence[int]) -> None:
        assert self._followers is None, "other hosts are not told"
        chosen = np.zeros(self._shapes.num_pages, bool)
        chosen[list(blocks)] = True
        self._kv = _spoilt(self._kv, chosen)

    def _make_empty(self) -> None:
        programs = self._compiler.programs
        self._kv = _zeros(programs.kv)
        self._slots = _made(partial(empty_slots, programs.shapes), programs.slots)
        self._history = _made(partial(empty_history, programs.shapes), programs.history)

    def run(self, packed: PackedStep) -> "tuple[Chosen, Array | None]":
        """What was chosen, and the scores of prompt tokens where a request wants them. A packed step says everything:
        whoever runs the same ones has the same on its devices."""
        for admission in packed.admissions:
            self._history = self._compiler.get(Admit())(self._history, admission)
        for seat in packed.seats:
            self._slots = self._compiler.get(Seat())(self._slots, seat)
        computed = self._forward(packed.bucket, packed.blob, adapted=packed.adapted)
        chosen = self._choose(packed.bucket, packed.variant, computed)
        scores = None if packed.targets is None else self._score_prompt(packed.bucket, computed, packed.targets)
        return chosen, scores

    def stage(self, packed: np.ndarray) -> PackedAdapter:
        """Makes what `loader.adapters.pack_adapter` has made ready to be loaded, on all hosts. From any thread; steps
        do not wait for it."""
        if self._followers is None:
            return PackedAdapter(packed)
        return self._followers.share({rank: packed[np.equal(self._ranks, rank)] for rank in {*self._ranks}})

    def load_adapter(self, slot: int, adapter: PackedAdapter) -> None:
        """Writes an adapter to a slot, from 1 on. Steps before it in the device's queue still see what was there."""
        if self._followers is not None:
            self._followers.load(slot, adapter)
        self._write_adapter(slot, adapter.rows)

    def load_bytes(self, slot: int, data: Buffer) -> None:
        """The same on a host that follows, with the bytes of its rows."""
        wanted = self._compiler.programs.adapter
        self._write_adapter(slot, np.frombuffer(data, wanted.dtype).reshape(-1, wanted.shape[1]))

    def _write_adapter(self, slot: int, rows: np.ndarray) -> None:
        """The one before it has to be in its slot: the memory plan counts one that is on its way. Where each comes with
        a step of its own, there is next to nothing to wait for: the steps before that one have been read."""
        assert 1 <= slot <= self._shapes.num_adapters, slot
        program, programs = self._compiler.get(LoadAdapter()), self._compiler.programs
        own = (len(programs.mesh.local_devices), programs.adapter.shape[1])
        assert rows.shape == own, "an adapter for another model, or for other devices"
        jax.block_until_ready(self._pairs)
        self._pairs = program(self._pairs, put_rows(rows, programs.adapter, programs.mesh), np.int32(slot - 1))

    @property
    def part_blocks(self) -> int:
        return max(self.staging.counts, default=0)

    def copy_out(self, blocks: Sequence[int]) -> Array:
        return self._copy_out(places_to_read(blocks, self.staging.count(len(blocks)), self._shapes.num_pages))

    def copy_in(self, blocks: Sequence[int], pages: Any) -> None:
        """`pages` may also lie elsewhere: on other devices of this process, or in the host's memory."""
        count = self.staging.count(len(blocks))
        assert pages.shape == self.staging.shape(count), "a copy of other blocks, or of another model"
        staged = jax.device_put(pages, self.staging.sharding)
        self._copy_in(staged, places_to_write(blocks, count, self._shapes.num_pages))

    def rehearse(self, buckets: Buckets) -> None:
        """Runs every program once, on nothing but padding: a device loads a program when it is first run, and no
        request shall wait for that."""
        admission, seat = packed_admission_size(self._shapes), packed_seat_size(self._shapes)
        nobody = np.zeros(max(admission, seat), np.int32)
        nobody[0] = self._shapes.num_slots
        self._history = self._compiler.get(Admit())(self._history, nobody[:admission])
        self._slots = self._compiler.get(Seat())(self._slots, nobody[:seat])
        for bucket in buckets:
            empty = Layout(bucket, self._shapes).empty()[0]
            if self._pairs is not None:
                self._forward(bucket, empty, adapted=True)
            computed = self._forward(bucket, empty)
            for variant in buckets.variants:
                self._choose(bucket, variant, computed)
            if not bucket.decode:
                self._score_prompt(bucket, computed, np.ones(bucket.tokens + 1, np.int32))
            del computed  # or it would still be there when the next one is made
        if self._pairs is not None:
            programs = self._compiler.programs
            rows = len(programs.mesh.local_devices)
            self._write_adapter(1, np.zeros((rows, programs.adapter.shape[1]), programs.adapter.dtype))
        for count in self.staging.counts:
            staged = self._copy_out(places_to_read((), count, self._shapes.num_pages))
            self._copy_in(staged, places_to_write((), count, self._shapes.num_pages))
            del staged
        jax.block_until_ready((self._kv, self._slots, self._history))

    def _copy_out(self, places: np.ndarray) -> Array:
        return self._compiler.get(CopyOut(len(places)))(self._kv, places)

    def _copy_in(self, staged: Array, places: np.ndarray) -> None:
        self._kv = self._compiler.get(CopyIn(len(places)))(self._kv, staged, places)

    def _forward(self, bucket: Bucket, blob: np.ndarray, *, adapted: bool = False) -> Computed:
        forward = self._compiler.get(Forward(bucket, adapted))
        pairs = (self._pairs,) if adapted else ()
        self._kv, self._slots, computed = forward(self._params, self._kv, self._slots, blob, *pairs)
        reach("device.step")
        return computed

    def _choose(self, bucket: Bucket, variant: Variant, computed: Computed) -> "Chosen":
        get, rows, logits = self._compiler.get, bucket.rows, computed.logits
        if variant == Variant.ANY:
            choose_any = get(ChooseAny(rows))
            self._slots, self._history, *chosen = choose_any(self._slots, self._history, logits, computed.rows)
            return Chosen(*chosen)
        ruled = variant >= Variant.RULED
        choices = get(Process(rows))(self._history, logits, computed.rows) if ruled else logits
        choose = get(Choose(rows, min(variant, Variant.FILTERED)))
        self._slots, tokens = choose(self._slots, choices, computed.rows)
        if ruled:
            self._history = get(Remember(rows))(self._history, computed.rows, tokens)
        return Chosen(tokens, get(Score(rows))(logits, tokens) if variant >= Variant.SCORED else None)

    def _score_prompt(self, bucket: Bucket, computed: Computed, targets: np.ndarray) -> Array:
        return self._compiler.get(ScorePrompt(bucket.tokens))(self._params, computed.hidden, targets)


@partial(jax.jit, donate_argnums=0)
def _spoilt(kv: Any, chosen: Array) -> Any:
    """Pages that are NaN where they are chosen; of whole numbers, the scales are."""

    def spoil(pages: Array) -> Array:
        if not jnp.issubdtype(pages.dtype, jnp.floating):
            return pages
        return jnp.where(chosen.reshape(-1, *[1] * (pages.ndim - 1)), jnp.asarray(jnp.nan, pages.dtype), pages)

    return jax.tree.map(spoil, kv)


def _zeros(wanted: Any) -> Any:
    return jax.tree.map(lambda each: _made(partial(jnp.zeros, each.shape, each.dtype), each), wanted)


def _made(make: Callable[[], Any], wanted: Any) -> Any:
    """What `make` gives, on the devices where it is wanted."""
    return jax.jit(make, out_shardings=jax.tree.map(lambda array: array.sharding, wanted))()


@dataclass(frozen=True, slots=True)
class Chosen:
    """What choosing says of a step."""

    tokens: Array  # [R] int32, negative where the logits were of no use
    logprobs: Array | None  # [R, 2 + 2k] int32, packed as `pack_logprobs` does


class PendingOutput:
    """A step's output on its way to the host."""

    def __init__(self, step: Sequence[Slice], chosen: Chosen, scores: Array | None):
        for array in (chosen.tokens, chosen.logprobs, scores):
            if array is not None:
                array.copy_to_host_async()
        self._step = step
        self._chosen = chosen
        self._scores = scores

    def is_done(self) -> bool:
        return self._chosen.tokens.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def read(self) -> StepResult:
        with asking(OutOfDeviceMemory):
            return self._read()

    def _read(self) -> StepResult:
        tokens = np.asarray(self._chosen.tokens)[: len(self._step)]
        logprobs = prompt_logprobs = None
        if self._chosen.logprobs is not None:
            logprobs = _unpack(np.asarray(self._chosen.logprobs)[: len(self._step)])
        if self._scores is not None:
            packed = np.asarray(self._scores)
            ends = np.cumsum([piece.length for piece in self._step])  # where each slice's tokens end in the batch
            prompt_logprobs = [
                _unpack(packed[end - piece.length : end]) if wants_prompt_logprobs(piece) else None
                for piece, end in zip(self._step, ends, strict=True)
            ]
        return StepResult(tokens, tokens >= 0, logprobs, prompt_logprobs)


def _unpack(packed: np.ndarray) -> Logprobs:
    """The host's side of `logprobs.pack_logprobs`."""
    floats, count = packed.view(np.float32), packed.shape[1] // 2 - 1
    return Logprobs(own=floats[:, 0], rank=packed[:, 1], top_ids=packed[:, 2 : 2 + count], top=floats[:, 2 + count :])
