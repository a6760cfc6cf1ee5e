"""A step as the model and its kernels see it."""

from collections.abc import Mapping
from typing import Any

from jax import Array

from hex_llm.kernels.window import Window
from hex_llm.pytree import pytree


@pytree
class Batch:
    """The tokens of a step, sequence after sequence, padded to a shape that is compiled already.

    Sequence s owns the tokens cu_q[s]:cu_q[s+1]; they are the last of its kv_len[s] tokens. The first `num_decode`
    sequences have one token each, and so have all of them where cu_q is None; where it is None itself, any may have
    one, but so few do that they need no way of their own. Padding sequences own no token and have kv_len 0. Padding
    tokens come last and write to page 0, which no request ever owns.
    """

    tokens: Array  # [T] int32
    positions: Array  # [T] int32
    write_page: Array  # [T] int32: where the token's key and value go
    write_offset: Array  # [T] int32
    cu_q: Array | None  # [S+1] int32
    kv_len: Array  # [S] int32
    page_table: Array  # [S, B] int32
    num_decode: Array | None  # [] int32
    num_seqs: Array  # [] int32
    long: Array | None = None  # [T] bool: of a sequence above the rope's switch; None: the model has no such
    plans: Mapping[Window, Any] | None = None  # what attention has worked out for all layers of a window (of 0: none)

    @property
    def real(self) -> Array:
        """[T] bool: whether the token is one, and no padding."""
        return self.write_page > 0
