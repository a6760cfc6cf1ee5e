"""MXFP4, the 4 bits of gpt-oss: places in a table of small numbers, 32 of which share a power of two.

Only experts are kept so, all of a layer in one tensor: blocks [experts, out, in/32, 16] of bytes, whose low halves come
first, and exponents [experts, out, in/32].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hex_llm.errors import CheckpointError
from hex_llm.kernels.quant_matmul.weight import Codes, Coding
from hex_llm.model_fields import Fields
from hex_llm.quantization.method import Method, Share, Stored, Tensor
from hex_llm.quantization.modules import within
from hex_llm.quantization.ranges import in_runs, widened
from hex_llm.quantization.sizes import check_group
from hex_llm.quantization.uniform import Uniform

_GROUP = 32
_NAN = 255  # an exponent that stands for no number
_PAIRS = _GROUP // 2
_BYTES = (np.dtype(np.uint8),)
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
_MANTISSA_BITS = 23  # of float32, whose exponent is off by 127, too


@dataclass(frozen=True, slots=True)
class Mxfp4:
    coding: Coding = field(default="mxfp4", init=False)
    group: int | None = field(default=_GROUP, init=False)
    has_zero: bool = field(default=False, init=False)
    has_order: bool = field(default=False, init=False)
    has_input_scale: bool = field(default=False, init=False)

    def tensors(self, module: str, out: int, size: int, experts: int | None) -> dict[str, Stored]:
        if experts is None:
            raise CheckpointError(f"{module} has no experts in one tensor, and only such are read in mxfp4.")
        check_group(module, size, _GROUP)
        groups = size // _GROUP
        return {
            f"{module}_blocks": Stored((experts, out, groups, _PAIRS), _BYTES),
            f"{module}_scales": Stored((experts, out, groups), _BYTES),
        }

    def read(
        self, tensors: Mapping[str, Tensor], module: str, expert: int | None, rows: slice, columns: slice
    ) -> Share:
        assert expert is not None  # `tensors` refuses what has none
        blocks = tensors[f"{module}_blocks"]
        across, columns = widened(columns, blocks.shape[2] * _GROUP, _GROUP)
        groups, one = in_runs(across, _GROUP), slice(expert, expert + 1)
        arrays = {
            "blocks": blocks[one, rows, groups, slice(None)][0],
            "scales": tensors[f"{module}_scales"][one, rows, groups][0],
        }
        if (arrays["scales"] == _NAN).any():
            raise CheckpointError(f"Tensor {module}_scales in {blocks.path} holds NaN, which is the exponent {_NAN}.")
        return Share(arrays, slice(0, len(arrays["scales"])), columns)

    def order(self, tensors: Mapping[str, Tensor], module: str) -> np.ndarray | None:
        return None

    def decode(self, arrays: Mapping[str, Array]) -> Codes:
        blocks, exponents = arrays["blocks"], arrays["scales"].astype(jnp.int32)
        codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
        # The least power of two is below what float32 has whole numbers of bits for.
        bits = jnp.where(exponents == 0, 1 << _MANTISSA_BITS - 1, exponents << _MANTISSA_BITS)
        scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return Codes(codes, scale, None, order=None, input_scale=None, coding="mxfp4")


def read_mxfp4(fields: Fields) -> Method:
    fields.only("quant_method", "modules_to_not_convert", "dequantize")
    skipped = within(fields, "modules_to_not_convert")
    return Uniform("mxfp4", Mxfp4(), lambda module: not module.endswith(_EXPERTS) or skipped(module))
