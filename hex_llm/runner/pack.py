"""From the engine's slices to a step's input."""

from collections.abc import Sequence

import numpy as np

from hex_llm.engine.request import Request
from hex_llm.engine.step import Slice
from hex_llm.runner.buckets import Bucket, Buckets, Variant
from hex_llm.runner.layout import COLUMNS, FLOAT_COLUMNS, HAS_RULES, LONG, SAMPLES, SAMPLING_COLUMNS, Layout, Shapes
from hex_llm.runner.packed_step import PackedStep
from hex_llm.runner.state import needed_variant, pack_admission, pack_seat

_SLOT, _KV_LEN, _FLAGS, _ADAPTER = (COLUMNS.index(name) for name in ("slot", "kv_len", "flags", "adapter"))
_SAMPLING = slice(COLUMNS.index(SAMPLING_COLUMNS[0]), None)


class Packer:
    """Writes steps, and remembers for each slot what does not change while a request holds it."""

    def __init__(self, shapes: Shapes, buckets: Buckets):
        self._shapes = shapes
        self._buckets = buckets
        self._layouts: dict[Bucket, Layout] = {}  # each works its fields out once
        self._sampling = np.zeros((shapes.num_slots, len(SAMPLING_COLUMNS)), np.int32)
        self._variant = np.zeros(shapes.num_slots, np.int32)
        self._flags = np.zeros(shapes.num_slots, np.int32)  # but for SAMPLES, which a step decides

    def pack(self, step: Sequence[Slice]) -> PackedStep:
        """Slices of one token come first."""
        for piece in step:
            if piece.fresh:
                self._remember(piece.request)
        num_seqs = len(step)
        slots = np.fromiter((piece.request.slot for piece in step), np.int32, num_seqs)
        scored = any(wants_prompt_logprobs(piece) for piece in step)
        # Also a chunk of one token in the middle of a prompt, which is a decode in all else.
        decode = all(piece.length == 1 for piece in step) and not scored
        bucket = self._buckets.choose(sum(piece.length for piece in step), decode=decode)
        blob, fields = self._layout(bucket).empty()
        fields["counts"][:] = sum(piece.length == 1 for piece in step), num_seqs
        rows = fields["rows"][:num_seqs]
        rows[:, _SLOT] = slots
        rows[:, _KV_LEN] = [piece.start + piece.length for piece in step]
        rows[:, _FLAGS] = [SAMPLES * piece.samples for piece in step]
        rows[:, _FLAGS] |= self._flags[slots]
        rows[:, _ADAPTER] = [piece.request.adapter_slot for piece in step]
        rows[:, _SAMPLING] = self._sampling[slots]
        self._write_gained(step, fields)
        joined = [pack_seat(piece.request, self._shapes) for piece in step if piece.fresh]
        if joined and not decode:
            assert len(joined) <= self._shapes.max_fresh, "more requests join than a step has room for"
            fields["fresh"][: len(joined)] = joined
        if decode:
            fields["tokens"][:num_seqs] = [_token(piece) for piece in step]
        else:
            self._write_tokens(step, fields)
        self._check(fields, joined)
        return PackedStep(
            bucket,
            self._buckets.variant(Variant(self._variant[slots].max())),
            blob,
            _targets(step, bucket) if scored else None,
            self._admissions(step),
            tuple(joined) if decode else (),
            adapted=bool(rows[:, _ADAPTER].any()),
        )

    def _admissions(self, step: Sequence[Slice]) -> tuple[np.ndarray, ...]:
        ruled = [piece.request for piece in step if piece.fresh and self._variant[piece.request.slot] >= Variant.RULED]
        return tuple(pack_admission(request, self._shapes) for request in ruled)

    def _remember(self, request: Request) -> None:
        sampling = request.sampling
        row = self._sampling[request.slot]
        row[: len(FLOAT_COLUMNS)].view(np.float32)[:] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        row[len(FLOAT_COLUMNS) :] = sampling.top_k, np.uint32(request.seed).view(np.int32)
        variant = needed_variant(request)
        self._variant[request.slot] = variant
        self._flags[request.slot] = HAS_RULES * (variant >= Variant.RULED) | LONG * request.is_long

    def _layout(self, bucket: Bucket) -> Layout:
        if bucket not in self._layouts:
            self._layouts[bucket] = Layout(bucket, self._shapes)
        return self._layouts[bucket]

    def _write_gained(self, step: Sequence[Slice], fields: dict[str, np.ndarray]) -> None:
        gained = [
            (piece.request.slot, index, piece.request.blocks[index])
            for piece in step
            if not piece.fresh and len(piece.request.blocks) > piece.num_old_blocks
            for index in range(piece.num_old_blocks, len(piece.request.blocks))
        ]
        if gained:
            fields["gained"][: len(gained)] = gained

    def _write_tokens(self, step: Sequence[Slice], fields: dict[str, np.ndarray]) -> None:
        fields["length"][: len(step)] = [piece.length for piece in step]
        place = 0
        for piece in step:
            stop = place + piece.length
            known = piece.request.tokens(piece.start, piece.start + piece.length)
            fields["tokens"][place:stop] = known or _token(piece)
            place = stop

    def _check(self, fields: dict[str, np.ndarray], joined: Sequence[np.ndarray]) -> None:
        """JAX clamps or drops an index out of range without a word, so that nothing else would notice one."""
        shapes = self._shapes
        limits = {_SLOT: shapes.num_slots, _KV_LEN: shapes.max_model_len, _ADAPTER: shapes.num_adapters}
        for column, limit in limits.items():
            values = fields["rows"][:, column]
            assert 0 <= values.min() <= values.max() <= limit, COLUMNS[column]
        assert -shapes.num_slots <= fields["tokens"].min() <= fields["tokens"].max() < shapes.vocab_size, "tokens"
        pages = [fields["gained"][:, 2], *(row[1:] for row in joined)]
        assert all(0 <= array.min() <= array.max() < shapes.num_pages for array in pages), "pages"
        assert fields["gained"][:, 1].max() < shapes.table_width, "page table index"


def wants_prompt_logprobs(piece: Slice) -> bool:
    """Whether the slice computes prompt tokens whose successors' log-probabilities were asked for."""
    request = piece.request
    return request.sampling.prompt_logprobs is not None and piece.start + 1 < len(request.prompt)


def _targets(step: Sequence[Slice], bucket: Bucket) -> np.ndarray:
    targets, place = np.zeros(bucket.tokens + 1, np.int32), 0
    for piece in step:
        if wants_prompt_logprobs(piece):
            following = piece.request.tokens(piece.start + 1, piece.start + piece.length + 1)
            targets[place : place + len(following)] = following
            targets[-1] = place + len(following)
        place += piece.length
    return targets


def _token(piece: Slice) -> int:
    """The token of a slice of one: its id, or where only the device knows it, a reference to the slot."""
    request = piece.request
    if piece.start < request.num_known:
        return request.tokens(piece.start, piece.start + 1)[0]
    return -1 - request.slot
