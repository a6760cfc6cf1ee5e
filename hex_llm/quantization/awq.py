"""AWQ as AutoAWQ packs it for its GEMM: whole numbers of 4 bits and zeros, in groups.

A matrix [out, in] lies as [in, out]. A word has eight neighbours of `out`, the even ones in its lower half.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jax import Array

from hex_llm.kernels.quant_matmul.weight import Codes, Coding
from hex_llm.model_fields import Fields
from hex_llm.module_names import all_names
from hex_llm.quantization import gptq
from hex_llm.quantization.method import Method, Share, Stored, Tensor
from hex_llm.quantization.modules import HEAD
from hex_llm.quantization.ranges import in_runs, widened
from hex_llm.quantization.sizes import check_apart, check_group, check_words, read_group
from hex_llm.quantization.uniform import Uniform
from hex_llm.quantization.words import INT32, per_word, unpack, unsigned
from hex_llm.safetensors_file import FLOATS

_BITS = 4
_WORD = per_word(_BITS)
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of its eight numbers
_READ = (
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "version",
    "format",
    "zero_point",
    "modules_to_not_convert",
    "backend",
)
# By what the weights are multiplied elsewhere.
_ELSEWHERE = ("exllama_config", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "rescale", "inplace")


@dataclass(frozen=True, slots=True)
class Awq:
    group: int | None
    coding: Coding = "int4"
    has_zero: bool = field(default=True, init=False)
    has_order: bool = field(default=False, init=False)
    has_input_scale: bool = field(default=False, init=False)

    def tensors(self, module: str, out: int, size: int, experts: int | None) -> dict[str, Stored]:
        check_apart(module, experts, "awq")
        check_group(module, size, self.group)
        check_words(module, "rows", out, _WORD)
        groups = size // (self.group or size)
        return {
            f"{module}.qweight": Stored((size, out // _WORD), INT32),
            f"{module}.qzeros": Stored((groups, out // _WORD), INT32),
            f"{module}.scales": Stored((groups, out), FLOATS),
        }

    def read(
        self, tensors: Mapping[str, Tensor], module: str, expert: int | None, rows: slice, columns: slice
    ) -> Share:
        qweight = tensors[f"{module}.qweight"]
        size, words = qweight.shape
        group = self.group or size
        out, rows = widened(rows, words * _WORD, _WORD)
        across, columns = widened(columns, size, self.group or 1)
        groups, packed = in_runs(across, group), in_runs(out, _WORD)
        arrays = {
            "qweight": qweight[across, packed],
            "qzeros": tensors[f"{module}.qzeros"][groups, packed],
            "scales": tensors[f"{module}.scales"][groups, out],
        }
        return Share(arrays, rows, columns)

    def order(self, tensors: Mapping[str, Tensor], module: str) -> np.ndarray | None:
        return None

    def decode(self, arrays: Mapping[str, Array]) -> Codes:
        codes, zero = (_columns(arrays[name]) for name in ("qweight", "qzeros"))
        return unsigned(codes, arrays["scales"].T, zero, self.coding)


def _columns(words: Array) -> Array:
    """[in, out/8] -> [out, in]."""
    return unpack(words, _BITS, _PLACES).reshape(len(words), -1).T


def read_awq(fields: Fields) -> Method:
    """Of a config of transformers, or of quant_config.json, which old models have."""
    others = (("bits", "w_bit"), ("group_size", "q_group_size"), ("version", "format"))
    fields = fields.with_defaults({name: fields.values[other] for name, other in others if fields.has(other)})
    fields.only(*_READ, *_ELSEWHERE, *gptq.CALIBRATION)
    if (bits := fields.integer("bits")) != _BITS:
        raise fields.refuse("bits", f"is {bits}; of AWQ, {_BITS} bits are read")
    version = fields.text("version", "gemm")
    if version.lower() != "gemm":
        raise fields.refuse("version", f"is {version[:60]!r}; of AWQ, the packing 'gemm' is read")
    if (backend := fields.text("backend", "autoawq")) not in ("autoawq", "auto"):
        raise fields.refuse("backend", f"is {backend[:60]!r}; of AWQ, the packing of 'autoawq' is read")
    if not fields.flag("zero_point", True):
        raise fields.refuse("zero_point", "is false; AWQ is read with zero points")
    skipped = fields.texts("modules_to_not_convert")

    def skips(module: str) -> bool:
        # AutoAWQ asks whether a word occurs anywhere in the name, and never takes the head.
        return module == HEAD or any(word in name for word in skipped for name in all_names(module))

    return Uniform("awq", Awq(read_group(fields)), skips)
