"""Methods that keep all modules alike but for some."""

from collections.abc import Callable
from dataclasses import dataclass

from hex_llm.quantization.method import Format, Tensor
from hex_llm.quantization.modules import Matches, kept

# Scales for a cache of keys and values. What type that has is for a flag to say, and float8 does without.
_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")


def cache_scale(tensor: Tensor) -> bool:
    return tensor.name.endswith(_CACHE_SCALES)


@dataclass(frozen=True, slots=True)
class Uniform:
    name: str
    common: Format
    skips: Matches
    spares: Callable[[Tensor], bool] = cache_scale

    def format(self, module: str) -> Format | None:
        return None if kept(module) or self.skips(module) else self.common

    def spare(self, tensor: Tensor) -> bool:
        return self.spares(tensor)
