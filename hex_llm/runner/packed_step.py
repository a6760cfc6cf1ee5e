"""A step as it goes to the device, and to other hosts."""

from dataclasses import dataclass

import numpy as np

from hex_llm.runner.buckets import Bucket, Variant


@dataclass(frozen=True, slots=True)
class PackedStep:
    bucket: Bucket
    variant: Variant
    blob: np.ndarray
    targets: np.ndarray | None  # [T + 1]: the successors of prompt tokens, and how far they reach, where one is wanted
    admissions: tuple[np.ndarray, ...]  # of requests that join and need their history, as `pack_admission` makes them
    seats: tuple[np.ndarray, ...]  # of requests that join in a step which only decodes, as `pack_seat` makes them
    adapted: bool = False  # some tokens have adapters
