"""Weights in float8, with a scale for each row or one for all; `x` is brought to float8 as well.

By what, files say: one scale that was found beforehand, or the largest number of each token. fbgemm would cut off what
is larger than its `activation_scale_ub`. That is not done: such a token has a larger scale instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from hex_llm.kernels.quant_matmul.weight import Codes, Coding
from hex_llm.model_fields import Fields
from hex_llm.quantization.method import Method, Share, Stored, Tensor
from hex_llm.quantization.modules import HEAD, listed, within
from hex_llm.quantization.sizes import check_apart
from hex_llm.quantization.uniform import Uniform
from hex_llm.safetensors_file import FLOATS

_FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn),)

type Scaled = Literal["row", "matrix"]  # what a scale is for


@dataclass(frozen=True, slots=True)
class Fp8:
    scaled: Scaled
    has_input_scale: bool  # the scale of `x` is in the file

    coding: Coding = field(default="fp8", init=False)
    group: int | None = field(default=None, init=False)
    has_zero: bool = field(default=False, init=False)
    has_order: bool = field(default=False, init=False)

    def tensors(self, module: str, out: int, size: int, experts: int | None) -> dict[str, Stored]:
        check_apart(module, experts, "fp8")
        found = {
            f"{module}.weight": Stored((out, size), _FLOAT8),
            f"{module}.weight_scale": row_scale(self.scaled, out),
        }
        return found | (stored_input_scale(module) if self.has_input_scale else {})

    def read(
        self, tensors: Mapping[str, Tensor], module: str, expert: int | None, rows: slice, columns: slice
    ) -> Share:
        weight = tensors[f"{module}.weight"][rows, columns]
        arrays = {
            "weight": weight,
            "weight_scale": read_row_scale(tensors[f"{module}.weight_scale"], self.scaled, rows, weight),
        }
        return Share(arrays, *(slice(0, size) for size in weight.shape))

    def order(self, tensors: Mapping[str, Tensor], module: str) -> np.ndarray | None:
        return None

    def decode(self, arrays: Mapping[str, Array]) -> Codes:
        scale = arrays["weight_scale"].astype(jnp.float32)
        return Codes(arrays["weight"], scale, None, order=None, input_scale=None, coding="fp8")


_ONE = Stored((), FLOATS, others=((1,), (1, 1)))


def row_scale(scaled: Scaled, out: int) -> Stored:
    return Stored((out, 1), FLOATS, others=((out,),)) if scaled == "row" else _ONE


def stored_input_scale(module: str) -> dict[str, Stored]:
    """Of a format that has one."""
    return {f"{module}.input_scale": _ONE}


def read_input_scale(tensors: Mapping[str, Tensor], module: str) -> np.ndarray:
    """[] float32: by what tokens are divided, where the file has it."""
    return single(tensors[f"{module}.input_scale"]).astype(np.float32)


def single(tensor: Tensor) -> np.ndarray:
    """[]: the one number of a tensor."""
    return np.asarray(tensor[()]).reshape(())


def read_row_scale(tensor: Tensor, scaled: Scaled, rows: slice, weight: np.ndarray) -> np.ndarray:
    """[rows, 1]."""
    if scaled == "row":
        return np.asarray(tensor[rows,]).reshape(-1, 1)
    return np.full((len(weight), 1), single(tensor))


def read_fp8(fields: Fields) -> Method:
    """Of AutoFP8: a scale for each matrix."""
    if fields.has("weight_block_size"):
        shown = fields.values["weight_block_size"]
        raise fields.refuse(
            "weight_block_size", f"is {str(shown)[:60]}; float8 in blocks (weight_scale_inv) is not read"
        )
    fields.only(
        "quant_method", "activation_scheme", "ignored_layers", "modules_to_not_convert", "fmt", "kv_cache_scheme",
        "weight_block_size", "kv_cache_quant_targets", "is_checkpoint_fp8_serialized",
    )  # fmt: skip
    if (kind := fields.text("fmt", "e4m3")) != "e4m3":
        raise fields.refuse("fmt", f"is {kind[:60]!r}; e4m3 is read")
    static = fields.one_of("activation_scheme", {"static": True, "dynamic": False})
    ignored, others = listed(fields, "ignored_layers"), within(fields, "modules_to_not_convert")
    return Uniform("fp8", Fp8("matrix", static), lambda module: module == HEAD or ignored(module) or others(module))


def read_fbgemm_fp8(fields: Fields) -> Method:
    """Of fbgemm, as Meta published large models: a scale for each row."""
    fields.only("quant_method", "activation_scale_ub", "modules_to_not_convert")
    skipped = within(fields, "modules_to_not_convert")
    return Uniform("fbgemm_fp8", Fp8("row", has_input_scale=False), lambda module: module == HEAD or skipped(module))
