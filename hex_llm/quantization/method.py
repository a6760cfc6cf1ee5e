"""What a way of keeping weights in few bits has to tell, so that models which are kept so can be loaded.

A `Method` is what a model's config says of all its weights, a `Format` how one of them lies in the checkpoint. Reading
has two halves: `read` takes a device's share from the files as it lies there, `decode`, which is traced and runs on the
device, makes codes of it. What becomes of the codes is none of a format's business. (`online` has no format: its codes
are made of what plain checkpoints have.)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from jax import Array

from hex_llm.kernels.quant_matmul.weight import Codes, Coding

type Arrays = dict[str, np.ndarray]
type Shape = tuple[int, ...]


class Tensor(Protocol):
    """A tensor of a checkpoint, of which parts can be had."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> np.dtype: ...
    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray: ...


class Stored(NamedTuple):
    """What a tensor of the checkpoint must be like."""

    shape: Shape | None  # None: any, and `read` looks at what is in it
    dtypes: tuple[np.dtype, ...]
    others: tuple[Shape, ...] = ()  # shapes that mean the same

    def admits(self, shape: Shape) -> bool:
        return self.shape is None or shape in (self.shape, *self.others)


class Share(NamedTuple):
    """Rows and columns of a matrix [out, in], read as they lie in the checkpoint. Of what they decode to, which may be
    more, since several numbers can lie in one word, `rows` and `columns` are wanted."""

    arrays: Arrays  # by the last words of the names of the tensors that they are made of
    rows: slice
    columns: slice


class Numbers(Protocol):
    """What the numbers of a matrix are, and how its codes are made. Hashable, and equal for all that are kept alike."""

    @property
    def coding(self) -> Coding: ...
    @property
    def group(self) -> int | None:
        """Columns that have a scale in common; None: all."""
        ...

    @property
    def has_zero(self) -> bool:
        """Whether groups have a code of zero of their own."""
        ...

    @property
    def has_order(self) -> bool:
        """Whether columns that have a scale in common need not follow each other."""
        ...

    @property
    def has_input_scale(self) -> bool:
        """Of fp8, w8a8 and w4a8: whether all tokens are divided by one number that the checkpoint has."""
        ...

    def decode(self, arrays: Mapping[str, Array]) -> Codes:
        """What a share's arrays stand for; without an order, and without a scale of what comes in."""
        ...


class Format(Numbers, Protocol):
    """How a matrix [out, in] lies in a checkpoint, in place of a tensor `MODULE.weight`."""

    def tensors(self, module: str, out: int, size: int, experts: int | None) -> dict[str, Stored]:
        """The tensors that the checkpoint has of it, by name. With `experts`, it is that many matrices in one, along
        the first dimension. Refuses sizes that do not go with it."""
        ...

    def read(
        self, tensors: Mapping[str, Tensor], module: str, expert: int | None, rows: slice, columns: slice
    ) -> Share:
        """A share. Columns count as `order` has them."""
        ...

    def order(self, tensors: Mapping[str, Tensor], module: str) -> np.ndarray | None:
        """[in] int32: the columns, in the order in which those with a scale in common follow each other; None unless
        `has_order`."""
        ...


class Method(Protocol):
    """What a model's config says of how its weights are kept."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def format(self, module: str) -> Format | None:
        """How the matrix of a module, such as model.layers.0.mlp.up_proj, is kept; None: as it is."""
        ...

    def spare(self, tensor: Tensor) -> bool:
        """Whether a tensor that neither the model nor a format has a place for may be in the checkpoint all the same,
        and goes unused."""
        ...
