"""Measurements that rates are made of, by name. docs/performance.md, "Which split", says where each number is from."""

from dataclasses import dataclass

from hex_llm.bench.disagg.fit import Point
from hex_llm.bench.disagg.rates import Bounds


@dataclass(frozen=True, slots=True)
class Preset:
    decodes: tuple[Point, ...]
    prompts: tuple[Point, ...]
    mixed_token_s: float
    bounds: Bounds
    kv_bytes_per_token: int


PRESETS = {
    "h200-llama-3.1-8b": Preset(
        decodes=(
            Point(1, 1500, 4.14e-3),
            Point(64, 1500, 7.66e-3),
            Point(128, 1500, 11.54e-3),
            # The same without attention, which takes 105.4 and 203.1 us in each of 32 layers.
            Point(64, 0, 4.29e-3),
            Point(128, 0, 5.04e-3),
        ),
        prompts=(
            Point(1, 512, 12.0e-3),
            Point(1, 1024, 22.4e-3),
            Point(1, 2048, 47.1e-3),
            Point(1, 4096, 99.0e-3),
            Point(1, 8192, 213.6e-3),
            Point(1, 32768, 1225e-3),
        ),
        mixed_token_s=17e-6,
        bounds=Bounds(kv_tokens=524_288, max_decode_seqs=128, step_tokens=8192, mixed_tokens=512),
        kv_bytes_per_token=32 * 2 * 8 * 128 * 2,  # layers, keys and values, heads, numbers, bytes
    ),
}
