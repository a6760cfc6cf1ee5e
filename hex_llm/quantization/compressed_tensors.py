"""What a config of compressed-tensors says: groups of modules, each kept in one way, and modules left as they are."""

from dataclasses import dataclass

import numpy as np

from hex_llm.kernels.quant_matmul.rows import TYPES
from hex_llm.model_fields import Fields
from hex_llm.quantization.compressed import METHOD, Int8, Words
from hex_llm.quantization.fp8 import Fp8, Scaled
from hex_llm.quantization.method import Format, Method, Tensor
from hex_llm.quantization.modules import Matches, kept, listed
from hex_llm.quantization.sizes import read_group
from hex_llm.quantization.uniform import cache_scale
from hex_llm.quantization.words import CODINGS

_LINEAR = "Linear"  # the target that means every module
_SCALED: dict[str, Scaled] = {"channel": "row", "tensor": "matrix"}
# As numbers lie: by the word for it, which of `_float8`, `_int8` and `_words` they may be.
_FORMATS = {"float-quantized": "float", "int-quantized": "int", "naive-quantized": "either", "pack-quantized": "words"}
_MIXED = "mixed-precision"  # each group says it
_SORTED = {"group": True, "dynamic": True, "weight": False, "static": False}
# What tells of the file, or of how its numbers were found, and the cache's scheme, for which there is a flag.
_ELSEWHERE = (
    "quant_method", "global_compression_ratio", "quantization_status", "kv_cache_scheme", "version", "run_compressed",
)  # fmt: skip
_FOUND = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "block_structure")
_READ = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder")
_INPUTS = ("input_scale", "input_zero_point")


@dataclass(frozen=True, slots=True)
class Group:
    matches: Matches
    format: Format


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    groups: tuple[Group, ...]  # the first that matches counts
    ignored: Matches
    name: str = METHOD

    def format(self, module: str) -> Format | None:
        if kept(module) or self.ignored(module):
            return None
        return next((group.format for group in self.groups if group.matches(module)), None)

    def spare(self, tensor: Tensor) -> bool:
        """Older files have zeros even where they say that there are none. What `x` would be rounded by does not count
        where it stays in 16 bits."""
        module, _, last = tensor.name.rpartition(".")
        found = self.format(module)
        if last == "weight_zero_point" or (last == "input_zero_point" and found is not None and found.coding in TYPES):
            return not np.any(np.asarray(tensor[tuple(slice(None) for _ in tensor.shape)], np.float32))
        return cache_scale(tensor) or (last in _INPUTS and found is not None)


def read_compressed_tensors(fields: Fields) -> Method:
    for name in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        _check_nothing(fields, name)
    fields.only("config_groups", "format", "ignore", "sparsity_config", "transform_config", *_ELSEWHERE)
    common = fields.text("format", "naive-quantized")
    if common not in (*_FORMATS, _MIXED):
        raise fields.refuse("format", f"is {common[:60]!r}, not {' or '.join(_FORMATS)}")
    section = fields.section("config_groups")
    if section is None or not section.values:
        raise fields.refuse("config_groups", "is missing or empty")
    groups = [_group(section, name, common) for name in section.values]
    # Names come before kinds of modules, as they do in the library.
    groups.sort(key=lambda each: each[0])
    return CompressedTensors(tuple(group for _, group in groups), _ignored(fields))


def _check_nothing(fields: Fields, name: str) -> None:
    """Refuses what changes the weights, or `x`, in further ways."""
    section = fields.section(name)
    if section is not None and section.values.get("format", "dense" if not section.values else None) != "dense":
        raise fields.refuse(name, f"is {str(fields.values[name])[:60]}, which is not read")


def _ignored(fields: Fields) -> Matches:
    by_name = listed(fields, "ignore")
    return (lambda module: True) if _LINEAR in fields.texts("ignore") else by_name


def _group(section: Fields, name: str, common: str) -> tuple[bool, Group]:
    fields = section.section(name)
    if fields is None:
        raise section.refuse(name[:60], "is null, not an object")
    fields.only("targets", "weights", "input_activations", "output_activations", "format")
    if fields.has("output_activations"):
        raise fields.refuse("output_activations", "is given, and outputs are not rounded here")
    weights = fields.section("weights")
    if weights is None:
        raise fields.refuse("weights", "is missing")
    weights.only(*_READ, *_FOUND)
    kind = fields.text("format", common)
    if kind not in _FORMATS:
        raise fields.refuse("format", f"is {kind[:60]!r}, not {' or '.join(_FORMATS)}")
    if weights.values.get("dynamic") not in (None, False):
        raise weights.refuse("dynamic", "is not false; weights whose scales are in the file are read")
    whole = weights.one_of("type", {"int": True, "float": False}, "int")
    inputs = fields.section("input_activations")
    match _FORMATS[kind], whole:
        case (("float" | "either"), False):
            found = _float8(fields, weights, inputs)
        case (("int" | "either"), True):
            found = _int8(weights, inputs)
        case "words", True:
            found = _words(fields, weights, inputs)
        case _:
            raise weights.refuse("type", f"is {weights.text('type', 'int')!r}, which {kind} is not read with")
    everything = _LINEAR in fields.texts("targets")
    return everything, Group((lambda module: True) if everything else listed(fields, "targets"), found)


def _bits(weights: Fields, *known: int) -> int:
    if (bits := weights.integer("num_bits", 8)) not in known:
        raise weights.refuse("num_bits", f"is {bits}; in this format, {' and '.join(map(str, known))} bits are read")
    return bits


def _float8(fields: Fields, weights: Fields, inputs: Fields | None) -> Fp8:
    _bits(weights, 8)
    if not weights.flag("symmetric", True):
        raise weights.refuse("symmetric", "is false; float8 is read without zeros")
    scaled = weights.one_of("strategy", _SCALED, "tensor")
    if inputs is None:
        raise fields.refuse("input_activations", "is missing; weights in float8 are multiplied by x in float8")
    return Fp8(scaled, _float8_inputs(inputs))


def _float8_inputs(inputs: Fields) -> bool:
    """Whether their scale is in the file."""
    static = _static(inputs, "float")
    if not inputs.flag("symmetric", True):
        raise inputs.refuse("symmetric", "is false; float8 is read without zeros")
    return static


def _int8(weights: Fields, inputs: Fields | None) -> Int8:
    _bits(weights, 8)
    scaled, symmetric = weights.one_of("strategy", _SCALED, "tensor"), weights.flag("symmetric", True)
    static = inputs is not None and _static(inputs, "int")
    if inputs is None or not symmetric or not inputs.flag("symmetric", True):
        # With zeros of either, `x` stays in 16 bits, which is more exact.
        return Int8(scaled, symmetric, "int8", has_input_scale=False)
    return Int8(scaled, symmetric, "w8a8", has_input_scale=static)


def _static(inputs: Fields, kind: str) -> bool:
    """Whether `x` is brought to 8 bits of a kind by one scale of the file, and not by that of each token."""
    inputs.only(*_READ, *_FOUND)
    _bits(inputs, 8)
    inputs.one_of("type", {kind: True}, "int")
    static = not inputs.flag("dynamic", False)
    # A token's own scale does for one that all of a batch would have had.
    inputs.one_of("strategy", {"tensor": True} if static else {"token": True, "tensor": True}, "tensor")
    return static


def _words(fields: Fields, weights: Fields, inputs: Fields | None) -> Words:
    bits = _bits(weights, *CODINGS)
    coding, static = CODINGS[bits], False
    if inputs is not None:
        if bits != 4:
            raise fields.refuse("input_activations", f"is given, and with words of {bits} bits x is not rounded here")
        coding, static = "w4a8", _float8_inputs(inputs)
    symmetric = weights.flag("symmetric", True)
    strategy = weights.text("strategy", "group" if weights.has("group_size") else "tensor")
    if strategy == "group":
        group = read_group(weights)
        return Words(coding, "row", group, symmetric, group is not None and _sorts(weights), static)
    scaled = weights.one_of("strategy", _SCALED, "tensor")
    if scaled == "matrix" and not symmetric:
        raise weights.refuse("symmetric", "is false, which is not read with the strategy 'tensor'")
    return Words(coding, scaled, None, symmetric, has_order=False, has_input_scale=static)


def _sorts(weights: Fields) -> bool:
    if isinstance(weights.values.get("actorder"), bool):
        return weights.flag("actorder", False)
    return weights.has("actorder") and weights.one_of("actorder", _SORTED)
