"""bitsandbytes: rows of 8-bit numbers, or places in a table of 16, of which 64 share a scale.

Of what its 8-bit kernel does, the weights are read; `x` stays in 16 bits here, which is more exact than rounding all of
it but for outliers. Matrices of 4 bits lie flat, so that groups stay within rows only where they divide them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from hex_llm.errors import CheckpointError
from hex_llm.kernels.quant_matmul.weight import TABLES, Codes, Coding
from hex_llm.model_fields import Fields
from hex_llm.quantization.method import Method, Share, Stored, Tensor
from hex_llm.quantization.modules import HEAD, within
from hex_llm.quantization.ranges import in_runs, widened
from hex_llm.quantization.sizes import check_apart, check_group
from hex_llm.quantization.uniform import Uniform, cache_scale
from hex_llm.safetensors_file import FLOATS

type FourBits = Literal["nf4", "fp4"]

_INT8_LARGEST = 127
_GROUP = 64  # the library's own, which no config can change
_NESTED_GROUP = 256
_FLOAT32, _INT8, _UINT8 = ((np.dtype(kind),) for kind in (np.float32, np.int8, np.uint8))
_STORAGE: dict[str, np.dtype] = {
    name: np.dtype(name) for name in ("uint8", "int8", "float16", "float32", "float64")
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
_TYPES: dict[str, FourBits] = {"nf4": "nf4", "fp4": "fp4"}
_ROWS = 0  # the `weight_format` of rows after each other; others were for one kind of device
_READ = (
    "load_in_8bit", "load_in_4bit", "_load_in_8bit", "_load_in_4bit", "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "llm_int8_skip_modules", "llm_int8_has_fp16_weight",
)  # fmt: skip
# How `x` is rounded and where weights are put elsewhere.
_ELSEWHERE = (
    "quant_method", "bnb_4bit_compute_dtype", "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Int8:
    coding: Coding = field(default="int8", init=False)
    group: int | None = field(default=None, init=False)
    has_zero: bool = field(default=False, init=False)
    has_order: bool = field(default=False, init=False)
    has_input_scale: bool = field(default=False, init=False)

    def tensors(self, module: str, out: int, size: int, experts: int | None) -> dict[str, Stored]:
        check_apart(module, experts, "bitsandbytes")
        return {f"{module}.weight": Stored((out, size), _INT8), f"{module}.SCB": Stored((out,), FLOATS)}

    def read(
        self, tensors: Mapping[str, Tensor], module: str, expert: int | None, rows: slice, columns: slice
    ) -> Share:
        weight = tensors[f"{module}.weight"][rows, columns]
        largest = tensors[f"{module}.SCB"][rows,].astype(np.float32)
        arrays = {"weight": weight, "SCB": largest[:, None] / np.float32(_INT8_LARGEST)}
        return Share(arrays, *(slice(0, size) for size in weight.shape))

    def order(self, tensors: Mapping[str, Tensor], module: str) -> np.ndarray | None:
        return None

    def decode(self, arrays: Mapping[str, Array]) -> Codes:
        return Codes(arrays["weight"], arrays["SCB"], None, order=None, input_scale=None, coding="int8")


@dataclass(frozen=True, slots=True)
class Table:
    """4 bits: the high half of a byte comes first."""

    coding: FourBits
    nested: bool  # scales are in 8 bits, and have scales
    storage: str  # the type that the bytes are said to be of

    group: int | None = field(default=_GROUP, init=False)
    has_zero: bool = field(default=False, init=False)
    has_order: bool = field(default=False, init=False)
    has_input_scale: bool = field(default=False, init=False)

    def tensors(self, module: str, out: int, size: int, experts: int | None) -> dict[str, Stored]:
        check_apart(module, experts, "bitsandbytes")
        check_group(module, size, _GROUP)
        kind, groups = _STORAGE[self.storage], out * size // _GROUP
        found = {
            f"{module}.weight": Stored((out * size // 2 // kind.itemsize, 1), (kind,)),
            f"{module}.weight.absmax": Stored((groups,), _UINT8 if self.nested else _FLOAT32),
            f"{module}.weight.quant_map": Stored((len(TABLES[self.coding]),), _FLOAT32),
            self._state(module): Stored(None, _UINT8),
        }
        if self.nested:
            found |= {
                f"{module}.weight.nested_absmax": Stored((-(-groups // _NESTED_GROUP),), _FLOAT32),
                f"{module}.weight.nested_quant_map": Stored((256,), _FLOAT32),
            }
        return found

    def read(
        self, tensors: Mapping[str, Tensor], module: str, expert: int | None, rows: slice, columns: slice
    ) -> Share:
        kind = _STORAGE[self.storage]
        state = self._read_state(tensors, module)
        count, size = state["shape"]
        if _beyond(rows, count) or _beyond(columns, size):
            raise CheckpointError(
                f"Tensor {self._state(module)} describes a matrix of {count} x {size}, and config.json makes it larger."
            )
        start, stop, _ = rows.indices(count)
        across, columns = widened(columns, size, _GROUP)
        row = size // 2 // kind.itemsize
        flat = tensors[f"{module}.weight"][slice(start * row, stop * row), slice(None)]
        packed = flat.reshape(stop - start, row).view(np.uint8)[:, in_runs(across, 2)]
        groups = slice(start * (size // _GROUP), stop * (size // _GROUP))
        scale = self._scales(tensors, module, groups, state).reshape(stop - start, -1)[:, in_runs(across, _GROUP)]
        return Share({"weight": packed, "weight.absmax": scale}, slice(0, stop - start), columns)

    def order(self, tensors: Mapping[str, Tensor], module: str) -> np.ndarray | None:
        return None

    def decode(self, arrays: Mapping[str, Array]) -> Codes:
        packed = arrays["weight"]
        codes = jnp.stack([packed >> 4, packed & 15], axis=-1).reshape(len(packed), -1)
        return Codes(codes, arrays["weight.absmax"], None, order=None, input_scale=None, coding=self.coding)

    def _state(self, module: str) -> str:
        return f"{module}.weight.quant_state.bitsandbytes__{self.coding}"

    def _read_state(self, tensors: Mapping[str, Tensor], module: str) -> dict[str, Any]:
        """What the library says of the matrix, compared with what the config says and with the size of its tensor."""
        tensor = tensors[self._state(module)]
        try:
            state = json.loads(tensor[slice(None),].tobytes())
        except ValueError:
            state = None
        match state:
            case {"quant_type": self.coding, "blocksize": 64, "shape": [int(count), int(size)]} if (
                count > 0 and size > 0 and count * size == 2 * _bytes(tensors[f"{module}.weight"])
            ):
                pass
            case _:
                raise CheckpointError(
                    f"Tensor {tensor.name} in {tensor.path} does not describe a matrix of its weight's size in "
                    f"{self.coding} with a blocksize of {_GROUP}: {str(state)[:200]}."
                )
        nested = isinstance(state.get("nested_offset"), float | int) and state.get("nested_blocksize") == _NESTED_GROUP
        if self.nested and not nested:
            raise CheckpointError(
                f"Tensor {tensor.name} in {tensor.path} lacks nested_offset, or its nested_blocksize is not "
                f"{_NESTED_GROUP}."
            )
        table = tensors[f"{module}.weight.quant_map"]
        if not np.array_equal(table[slice(None),], TABLES[self.coding]):
            raise CheckpointError(f"Tensor {table.name} in {table.path} is not the table of {self.coding}.")
        return state

    def _scales(
        self, tensors: Mapping[str, Tensor], module: str, groups: slice, state: Mapping[str, Any]
    ) -> np.ndarray:
        """Those of the groups. On the host, where what is rounded is sure: devices fuse a product and a sum."""
        scales = tensors[f"{module}.weight.absmax"][groups,]
        if not self.nested:
            return scales
        table = tensors[f"{module}.weight.nested_quant_map"][slice(None),]
        outer = tensors[f"{module}.weight.nested_absmax"][slice(None),]
        of_scale = np.arange(groups.start, groups.stop) // _NESTED_GROUP
        return table[scales] * outer[of_scale] + np.float32(state["nested_offset"])


def _beyond(part: slice, size: int) -> bool:
    return part.stop is not None and part.stop > size


def _bytes(tensor: Tensor) -> int:
    return int(np.prod(tensor.shape)) * tensor.dtype.itemsize


def read_bitsandbytes(fields: Fields) -> Method:
    fields.only(*_READ, *_ELSEWHERE)
    eight, four = fields.flag("load_in_8bit", False), fields.flag("load_in_4bit", False)
    if eight == four:
        raise fields.refuse("load_in_8bit", f"and load_in_4bit are both {str(eight).lower()}")
    if eight and fields.flag("llm_int8_has_fp16_weight", False):
        raise fields.refuse("llm_int8_has_fp16_weight", "is true; weights in 8 bits are read")
    skipped = within(fields, "llm_int8_skip_modules")
    # Where no modules are named, transformers leaves out the head.
    head = not fields.has("llm_int8_skip_modules")
    return Uniform(
        "bitsandbytes",
        Int8() if eight else _table(fields),
        lambda module: skipped(module) or (head and module == HEAD),
        _spare_int8 if eight else cache_scale,
    )


def _table(fields: Fields) -> Table:
    coding = fields.one_of("bnb_4bit_quant_type", _TYPES, "fp4")
    storage = fields.text("bnb_4bit_quant_storage", "uint8").removeprefix("torch.")
    if storage not in _STORAGE:
        raise fields.refuse("bnb_4bit_quant_storage", f"is {storage[:60]!r}, not {' or '.join(_STORAGE)}")
    return Table(coding, fields.flag("bnb_4bit_use_double_quant", False), storage)


def _spare_int8(tensor: Tensor) -> bool:
    """Newer files say how the rows lie."""
    if not tensor.name.endswith(".weight_format"):
        return cache_scale(tensor)
    if (found := np.asarray(tensor[()]).reshape(-1).tolist()) != [_ROWS]:
        raise CheckpointError(f"Tensor {tensor.name} in {tensor.path} is {found}; rows, which is [{_ROWS}], are read.")
    return True
