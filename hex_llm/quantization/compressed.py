"""Whole numbers as compressed-tensors keeps them: in words of 32 bits, or of 8 bits as they are.

In words, a matrix [out, in] has neighbours of `in` together, and one of zeros neighbours of `out`. All numbers in words
are from 0 on, with the middle for zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from hex_llm.errors import CheckpointError
from hex_llm.kernels.quant_matmul.weight import Codes, Coding, bits
from hex_llm.quantization.act_order import order_of
from hex_llm.quantization.fp8 import Scaled, read_row_scale, row_scale, stored_input_scale
from hex_llm.quantization.method import Share, Stored, Tensor
from hex_llm.quantization.ranges import in_runs, widened
from hex_llm.quantization.sizes import check_apart, check_group, check_words
from hex_llm.quantization.words import INT32, per_word, unpack, unsigned
from hex_llm.safetensors_file import FLOATS

METHOD = "compressed-tensors"
_SHAPES = tuple(np.dtype(kind) for kind in (np.int64, np.int32))
_INT8 = (np.dtype(np.int8),)


@dataclass(frozen=True, slots=True)
class Words:
    """Numbers of 4 or 8 bits; with w4a8, `x` is brought to float8 as well."""

    coding: Coding
    scaled: Scaled  # where there are no groups
    group: int | None
    symmetric: bool
    has_order: bool  # a tensor says which group a column belongs to
    has_input_scale: bool = False  # of w4a8: the scale of `x` is in the file

    @property
    def bits(self) -> int:
        return bits(self.coding)

    @property
    def has_zero(self) -> bool:
        return self.bits == 4 or not self.symmetric

    def tensors(self, module: str, out: int, size: int, experts: int | None) -> dict[str, Stored]:
        check_apart(module, experts, METHOD)
        check_group(module, size, self.group)
        word = per_word(self.bits)
        check_words(module, "columns", size, word)
        groups = size // (self.group or size)
        scale = row_scale(self.scaled, out) if self.group is None else Stored((out, groups), FLOATS)
        found = {
            f"{module}.weight_packed": Stored((out, size // word), INT32),
            f"{module}.weight_scale": scale,
            f"{module}.weight_shape": Stored((2,), _SHAPES),
        }
        if not self.symmetric:
            check_words(module, "rows", out, word)
            found[f"{module}.weight_zero_point"] = Stored((out // word, groups), INT32)
        if self.has_order:
            found[f"{module}.weight_g_idx"] = Stored((size,), INT32)
        if self.has_input_scale:
            found |= stored_input_scale(module)
        return found

    def read(
        self, tensors: Mapping[str, Tensor], module: str, expert: int | None, rows: slice, columns: slice
    ) -> Share:
        word = per_word(self.bits)
        packed, scales = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
        count, size = packed.shape[0], packed.shape[1] * word
        _check_shape(tensors[f"{module}.weight_shape"], count, size)
        out, rows = widened(rows, count, 1 if self.symmetric else word)
        across, columns = widened(columns, size, np.lcm(self.group or 1, word))
        groups = in_runs(across, self.group or size)
        weight = packed[out, slice(None) if self.has_order else in_runs(across, word)]
        scale = read_row_scale(scales, self.scaled, out, weight) if self.group is None else scales[out, groups]
        arrays = {"weight_packed": weight, "weight_scale": scale}
        if not self.symmetric:
            arrays["weight_zero_point"] = tensors[f"{module}.weight_zero_point"][in_runs(out, word), groups]
        if (order := self.order(tensors, module)) is not None:
            arrays["weight_g_idx"] = order[across]
        return Share(arrays, rows, columns)

    def order(self, tensors: Mapping[str, Tensor], module: str) -> np.ndarray | None:
        if not self.has_order or self.group is None:
            return None
        return order_of(tensors[f"{module}.weight_g_idx"], self.group)

    def decode(self, arrays: Mapping[str, Array]) -> Codes:
        codes = unpack(arrays["weight_packed"], self.bits).reshape(len(arrays["weight_packed"]), -1)
        if self.has_order:
            codes = codes[:, arrays["weight_g_idx"]]
        zero = None
        if not self.symmetric:
            packed = arrays["weight_zero_point"]
            zero = unpack(packed, self.bits).swapaxes(1, 2).reshape(-1, packed.shape[1])
        return unsigned(codes, arrays["weight_scale"], zero, self.coding)


@dataclass(frozen=True, slots=True)
class Int8:
    """Rows of whole numbers; with w8a8, which has no zeros, `x` is brought to whole numbers as well."""

    scaled: Scaled
    symmetric: bool
    coding: Literal["int8", "w8a8"]
    has_input_scale: bool  # of w8a8: the scale of `x` is in the file

    group: int | None = field(default=None, init=False)
    has_order: bool = field(default=False, init=False)

    @property
    def has_zero(self) -> bool:
        return not self.symmetric

    def tensors(self, module: str, out: int, size: int, experts: int | None) -> dict[str, Stored]:
        check_apart(module, experts, METHOD)
        scale = row_scale(self.scaled, out)
        found = {f"{module}.weight": Stored((out, size), _INT8), f"{module}.weight_scale": scale}
        if self.has_input_scale:
            found |= stored_input_scale(module)
        return found if self.symmetric else found | {f"{module}.weight_zero_point": scale._replace(dtypes=_INT8)}

    def read(
        self, tensors: Mapping[str, Tensor], module: str, expert: int | None, rows: slice, columns: slice
    ) -> Share:
        weight = tensors[f"{module}.weight"][rows, columns]
        names = ("weight_scale",) if self.symmetric else ("weight_scale", "weight_zero_point")
        per_row = {name: read_row_scale(tensors[f"{module}.{name}"], self.scaled, rows, weight) for name in names}
        return Share({"weight": weight, **per_row}, *(slice(0, size) for size in weight.shape))

    def order(self, tensors: Mapping[str, Tensor], module: str) -> np.ndarray | None:
        return None

    def decode(self, arrays: Mapping[str, Array]) -> Codes:
        zero = None if self.symmetric else arrays["weight_zero_point"].astype(jnp.float32)
        scale = arrays["weight_scale"].astype(jnp.float32)
        return Codes(arrays["weight"], scale, zero, order=None, input_scale=None, coding=self.coding)


def _check_shape(tensor: Tensor, out: int, size: int) -> None:
    if (found := np.asarray(tensor[slice(None),]).tolist()) != [out, size]:
        raise CheckpointError(f"Tensor {tensor.name} in {tensor.path} is {found}, but its matrix is {[out, size]}.")
