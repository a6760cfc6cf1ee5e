"""GPTQ: whole numbers of 4 or 8 bits and zeros, in groups, perhaps of columns that were sorted first.

A matrix [out, in] lies as [in, out]: a word has neighbours of `in`, but one of zeros has neighbours of `out`. Files of
the first version have zeros less one, so that 16 can be one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from jax import Array

from hex_llm.errors import CheckpointError
from hex_llm.kernels.quant_matmul.weight import Codes, Coding, bits
from hex_llm.model_fields import Fields
from hex_llm.module_names import all_names
from hex_llm.quantization.act_order import check_unsorted, order_of
from hex_llm.quantization.method import Format, Method, Share, Stored, Tensor
from hex_llm.quantization.modules import HEAD, kept, regex
from hex_llm.quantization.ranges import in_runs, widened
from hex_llm.quantization.sizes import check_apart, check_group, check_words, read_group
from hex_llm.quantization.uniform import cache_scale
from hex_llm.quantization.words import CODINGS, INT32, per_word, unpack, unsigned
from hex_llm.safetensors_file import FLOATS

_SHIFTS = {"gptq": 1, "gptq_v2": 0}  # what is added to a zero of the file, by the file's format
_READ = (
    "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "lm_head", "dynamic",
    "modules_in_block_to_quantize", "pack_dtype",
)  # fmt: skip
# How the numbers were found, and who made them: nothing that their reader needs.
CALIBRATION = (
    "quant_method", "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs",
    "damp_auto_increment", "damp_percent", "dataset", "desc_act", "exllama_config", "exllama_version",
    "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen",
    "module_name_preceding_first_block", "mse", "offload_to_disk", "pad_token_id", "static_groups", "sym",
    "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "v2", "v2_alpha", "hyb_act", "parallel_packing",
    "device",
)  # fmt: skip
_OVERRIDES = ("bits", "group_size", "sym", "desc_act")


@dataclass(frozen=True, slots=True)
class Gptq:
    coding: Coding
    group: int | None
    symmetric: bool  # the zero of all is the middle
    has_order: bool
    shift: int  # to be added to zeros
    has_input_scale: bool = field(default=False, init=False)

    @property
    def bits(self) -> int:
        return bits(self.coding)

    @property
    def has_zero(self) -> bool:
        return self.bits == 4 or not self.symmetric

    def tensors(self, module: str, out: int, size: int, experts: int | None) -> dict[str, Stored]:
        check_apart(module, experts, "gptq")
        check_group(module, size, self.group)
        word = per_word(self.bits)
        check_words(module, "rows", out, word)
        check_words(module, "columns", size, word)
        groups = size // (self.group or size)
        return {
            f"{module}.qweight": Stored((size // word, out), INT32),
            f"{module}.qzeros": Stored((groups, out // word), INT32),
            f"{module}.scales": Stored((groups, out), FLOATS),
            f"{module}.g_idx": Stored((size,), INT32),
        }

    def read(
        self, tensors: Mapping[str, Tensor], module: str, expert: int | None, rows: slice, columns: slice
    ) -> Share:
        word = per_word(self.bits)
        qweight, zeros = tensors[f"{module}.qweight"], tensors[f"{module}.qzeros"]
        size, count = qweight.shape[0] * word, qweight.shape[1]
        group = self.group or size
        out, rows = widened(rows, count, word)
        across, columns = widened(columns, size, np.lcm(self.group or 1, word))
        groups = in_runs(across, group)
        arrays = {"scales": tensors[f"{module}.scales"][groups, out]}
        qzeros = zeros[groups, in_runs(out, word)]
        if self.has_zero:
            arrays["qzeros"] = qzeros
        else:
            self._check_middle(zeros, qzeros)
        order = self.order(tensors, module)
        if order is None:
            arrays["qweight"] = qweight[in_runs(across, word), out]
        else:  # the columns of a group are anywhere, so all come along
            arrays |= {"qweight": qweight[slice(None), out], "g_idx": order[across]}
        return Share(arrays, rows, columns)

    def order(self, tensors: Mapping[str, Tensor], module: str) -> np.ndarray | None:
        groups = tensors[f"{module}.g_idx"]
        if self.group is None:
            return None
        if self.has_order:
            return order_of(groups, self.group)
        check_unsorted(groups, self.group)
        return None

    def decode(self, arrays: Mapping[str, Array]) -> Codes:
        codes = unpack(arrays["qweight"], self.bits).swapaxes(0, 1).reshape(arrays["qweight"].shape[1], -1)
        if self.has_order:
            codes = codes[:, arrays["g_idx"]]
        zero = None
        if self.has_zero:
            packed = arrays["qzeros"]
            zero = unpack(packed, self.bits).reshape(len(packed), -1).T + self.shift
        return unsigned(codes, arrays["scales"].T, zero, self.coding)

    def _check_middle(self, tensor: Tensor, zeros: np.ndarray) -> None:
        middle = (1 << self.bits - 1) - self.shift
        if np.any(np.ascontiguousarray(zeros).view(np.uint8) != middle):
            raise CheckpointError(
                f"Tensor {tensor.name} in {tensor.path} has zeros other than {middle}, and sym in the config says that "
                "there are none."
            )


@dataclass(frozen=True, slots=True)
class GptqMethod:
    common: Gptq
    head: bool  # whether it is among them
    taken: tuple[str, ...] | None  # last words of the names of those that are; None: of all
    choose: Callable[[str], Gptq | None]
    name: str = "gptq"

    def format(self, module: str) -> Format | None:
        if kept(module) or (module == HEAD and not self.head):
            return None
        if module != HEAD and self.taken is not None and not module.endswith(self.taken):
            return None
        return self.choose(module)

    def spare(self, tensor: Tensor) -> bool:
        """Some packers give every module a bias, which is zero where the model has none."""
        return cache_scale(tensor) or (tensor.name.endswith(".bias") and not np.any(tensor[slice(None),]))


def read_gptq(fields: Fields) -> Method:
    fields.only(*_READ, *CALIBRATION)
    common = _format(fields, fields)
    if (word := fields.text("pack_dtype", "int32")) != "int32":
        raise fields.refuse("pack_dtype", f"is {word[:60]!r}; words of int32 are read")
    taken = fields.values.get("modules_in_block_to_quantize")
    return GptqMethod(
        common,
        fields.flag("lm_head", False),
        None if taken is None else _flat(fields, taken),
        _dynamic(fields, common),
    )


def _format(fields: Fields, whole: Fields) -> Gptq:
    """What some modules are like. Of `whole`, which says it of all, comes what is the same for all."""
    if (width := fields.integer("bits")) not in CODINGS:
        raise fields.refuse("bits", f"is {width}; of GPTQ, 4 and 8 bits are read")
    name = "checkpoint_format" if whole.has("checkpoint_format") else "format"
    group = read_group(fields, 128)
    # With one group, any order will do.
    sorts = fields.flag("desc_act", False) and group is not None
    return Gptq(CODINGS[width], group, fields.flag("sym", True), sorts, whole.one_of(name, _SHIFTS, "gptq"))


def _dynamic(fields: Fields, common: Gptq) -> Callable[[str], Gptq | None]:
    """Exceptions by name, of which the first that matches counts: left as they are after `-:`, or of other sizes."""
    section = fields.section("dynamic")
    rules = []
    for key in section.values if section else ():
        assert section is not None
        pattern = regex(fields, "dynamic", key.removeprefix("-:").removeprefix("+:"))
        if key.startswith("-:"):
            rules.append((pattern, None))
            continue
        changes = section.section(key)
        if changes is None:
            raise section.refuse(key[:60], "is null, not an object")
        changes.only(*_OVERRIDES, *CALIBRATION)
        rules.append((pattern, _format(changes.with_defaults(_given(fields)), fields)))

    def choose(module: str) -> Gptq | None:
        found = (rule for pattern, rule in rules if any(pattern.match(name) for name in all_names(module)))
        return next(found, common)

    return choose


def _given(fields: Fields) -> dict:
    return {name: fields.values[name] for name in _OVERRIDES if fields.has(name)}


def _flat(fields: Fields, lists: object) -> tuple[str, ...]:
    name = "modules_in_block_to_quantize"
    if not isinstance(lists, list):
        raise fields.refuse(name, "is not a list")
    found = [Fields(fields.source, {name: each if isinstance(each, list) else [each]}, fields.prefix) for each in lists]
    return tuple(f".{text}" for each in found for text in each.texts(name))
