"""Weights that a checkpoint has in whole numbers of 4 bits, with tokens in float8: what --quantization=w4a8 makes of
the method that they are kept by."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from hex_llm.kernels.quant_matmul.weight import W4A8_COLUMNS
from hex_llm.quantization.method import Format, Method, Tensor
from hex_llm.quantization.modules import HEAD


@dataclass(frozen=True, slots=True)
class NarrowTokens:
    method: Method

    @property
    def name(self) -> str:
        return f"{self.method.name} and tokens in float8"

    def format(self, module: str) -> Format | None:
        found: Any = self.method.format(module)
        if module == HEAD:  # what is nearly alike is told apart there
            return found
        if found is None or found.coding != "int4" or found.has_order or (found.group or 0) % W4A8_COLUMNS:
            return found
        return dataclasses.replace(found, coding="w4a8")

    def spare(self, tensor: Tensor) -> bool:
        return self.method.spare(tensor)
