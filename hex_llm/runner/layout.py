"""A step's input: one array of 32-bit words, so that one upload brings it all.

The host writes its fields through views of the array; the compiled step cuts the same fields out again.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hex_llm.engine.sampling import MAX_BAD_WORD_TOKENS
from hex_llm.runner.buckets import Bucket

# The columns of the field `rows`, whose first rows are the sequences. Floats travel as their bits.
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
SAMPLING_COLUMNS = (*FLOAT_COLUMNS, "top_k", "seed")
# kv_len: tokens with this step's; adapter: the slot of the sequence's, from 1 on.
COLUMNS = ("slot", "kv_len", "flags", "adapter", *SAMPLING_COLUMNS)

# The bits of the column `flags`.
SAMPLES = 1  # the sampled token is kept
HAS_RULES = 2  # what the history says of the slot is about this request, not about one before it
LONG = 4  # the sequence is above the rope's switch, and with it all its tokens are

MAX_RULE_PREFIX = MAX_BAD_WORD_TOKENS - 1  # a bad word's tokens before its last


@dataclass(frozen=True)
class Shapes:
    """Sizes that all steps of an engine share. Slot `num_slots` and page 0 belong to padding."""

    num_slots: int
    page_size: int
    table_width: int
    num_pages: int
    max_fresh: int  # requests that may join in one step
    mixed_tokens: int  # the largest step with prompts that also holds the decodes of others; 0 where none does
    max_model_len: int
    vocab_size: int
    num_adapters: int = 0  # slots for adapters
    has_long: bool = False  # the model rotates long sequences otherwise than short ones


@dataclass(frozen=True)
class Layout:
    bucket: Bucket
    shapes: Shapes

    @cached_property
    def fields(self) -> dict[str, tuple[int, ...]]:
        bucket, shapes = self.bucket, self.shapes
        fields = {
            "rows": (bucket.rows, len(COLUMNS)),
            "tokens": (bucket.tokens,),  # -1 - slot: the token that the slot's request sampled last
            "counts": (2,),  # sequences of one token, sequences
            # Blocks that running requests gained: (slot, index in the slot's page table, page).
            "gained": (bucket.seqs + (0 if bucket.decode else bucket.tokens // shapes.page_size), 3),
        }
        if not bucket.decode:
            fields["length"] = (bucket.seqs,)  # tokens in this step
            fields["fresh"] = (shapes.max_fresh, 1 + shapes.table_width)  # slot, its whole page table
        return fields

    @cached_property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.fields.values())

    def cut(self, blob: Any) -> dict[str, Any]:
        """The fields of a blob: views of a numpy array, or pieces of a JAX array."""
        pieces, start = {}, 0
        for name, shape in self.fields.items():
            stop = start + math.prod(shape)
            pieces[name] = blob[start:stop].reshape(shape)
            start = stop
        return pieces

    def empty(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A step of nothing but padding, and its fields to write to."""
        blob = np.zeros(self.size, np.int32)
        fields = self.cut(blob)
        fields["rows"][:, COLUMNS.index("slot")] = self.shapes.num_slots
        fields["gained"][:, 0] = self.shapes.num_slots
        if not self.bucket.decode:
            fields["fresh"][:, 0] = self.shapes.num_slots
        return blob, fields
