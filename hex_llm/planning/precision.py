"""In how many bits weights, keys and values are kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hex_llm.model_fields import Fields

type Weights = Literal["bf16", "int8", "w8a8", "fp8", "int4", "w4a8", "mxfp4"]
type Cache = Literal["auto", "fp8", "int8"]

# Bits of a weight in memory with its share of scales: codes of 4 bits have 16 bits of scale and 16 of zero for each
# 128 (70B in AWQ takes 37.78 GiB, docs/performance.md), those of MXFP4 8 bits of scale for each 32.
BITS: dict[Weights, float] = {"bf16": 16, "int8": 8, "w8a8": 8, "fp8": 8, "int4": 4.25, "w4a8": 4.25, "mxfp4": 4.25}
PLAIN = 2  # bytes of a number that is never in few bits: embedding, head
NARROW_COLUMNS = 128  # as `kernels/quant_matmul/weight` has them, which needs JAX; a test compares
# By the names of a checkpoint's quantization methods, which all keep weights in one of those ways.
_BY_METHOD: dict[str, Weights] = {"awq": "int4", "gptq": "int4", "fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}


@dataclass(frozen=True, slots=True)
class Precision:
    weights: Weights
    cache: Cache = "auto"
    experts_only: bool = False  # all but experts is plain

    @property
    def bytes(self) -> float:
        """Of a weight."""
        return BITS[self.weights] / 8

    @property
    def nominal_bits(self) -> int:
        """As people say it, without scales."""
        return int(BITS[self.weights])

    def head_bytes(self, head_dim: int) -> float:
        """Of the keys, or the values, of one token in one head; int8 has a scale of 4 bytes for it."""
        match self.cache:
            case "auto":
                return 2 * head_dim
            case "fp8":
                return head_dim
            case "int8":
                return head_dim + 4


def read_precision(config: Mapping[str, Any], source: str) -> Weights:
    """How a checkpoint keeps its weights."""
    section = Fields(source, config).section("quantization_config")
    if section is None:
        return "bf16"
    method = section.text("quant_method")
    bits = 4 if section.flag("load_in_4bit", False) else section.integer("bits", 8)
    match method:
        case "awq" | "gptq":
            return "int8" if bits == 8 and section.has("bits") else "int4"
        case "bitsandbytes":
            return "int4" if bits == 4 else "int8"
        case "compressed-tensors":
            return _compressed(section)
    if method not in _BY_METHOD:
        known = ", ".join(sorted({*_BY_METHOD, "bitsandbytes", "compressed-tensors"}))
        raise section.refuse("quant_method", f"is {method[:60]!r}, and those known are {known}")
    return _BY_METHOD[method]


def has_rounded_tokens(config: Mapping[str, Any], source: str) -> bool:
    """Whether --quantization=w4a8 finds weights in a checkpoint of 4 bits whose tokens it can round: whole numbers, in
    groups of a multiple of so many columns as they follow each other (`quantization/narrow_tokens`)."""
    section = Fields(source, config).section("quantization_config")
    if section is None:
        return False
    match section.text("quant_method"):
        case "awq" | "gptq":
            default = section.integer("q_group_size", 128, smallest=-1)
            group, is_sorted = section.integer("group_size", default, smallest=-1), section.flag("desc_act", False)
        case "compressed-tensors":
            weights, _ = _first_group(section)
            group, is_sorted = weights.integer("group_size", -1, smallest=-1), weights.values.get("actorder")
        case _:
            return False
    # With one group, any order will do; of those of compressed-tensors, these leave the columns where they were.
    return group == -1 or (group > 0 and group % NARROW_COLUMNS == 0 and is_sorted in (None, False, "weight", "static"))


def _first_group(section: Fields) -> tuple[Fields, Mapping[str, Any] | None]:
    """What compressed-tensors says of weights, and of their tokens where they are rounded."""
    groups = section.values.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(weights, dict):
        raise section.refuse("config_groups", "says nothing of weights")
    inputs = first.get("input_activations")
    return Fields(section.source, weights, f"{section.prefix}config_groups."), inputs if isinstance(
        inputs, dict
    ) else None


def _compressed(section: Fields) -> Weights:
    weights, inputs = _first_group(section)
    if weights.values.get("num_bits") == 4:
        return "int4" if inputs is None else "w4a8"
    if weights.values.get("type") == "float":
        return "fp8"
    # As `quantization/compressed_tensors` has it: with zeros of either, tokens stay as they are.
    both = inputs is not None and weights.values.get("symmetric", True) and inputs.get("symmetric", True)
    return "w8a8" if both else "int8"
