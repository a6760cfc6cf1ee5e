"""Looking for numbers that are none while they are read."""

from typing import Literal

import ml_dtypes
import numpy as np

from hex_llm.errors import CheckpointError
from hex_llm.quantization.method import Tensor

type Check = Literal["sample", "full", "off"]

FLOATS = tuple(np.dtype(each) for each in (np.float16, ml_dtypes.bfloat16, np.float32))
_SAMPLED = 65536  # values of each piece that are looked at


def check_finite(tensor: Tensor, piece: np.ndarray, check: Check) -> None:
    """Refuses NaN and infinity. `check` says how many of the values are looked at."""
    if check == "off":
        return
    # Whole rows at even distances: a stride over single values would touch the same pages for less.
    step = max(1, piece.size // _SAMPLED) if check == "sample" else 1
    if not np.isfinite(piece[::step] if piece.ndim else piece).all():
        raise CheckpointError(f"Tensor {tensor.name} in {tensor.path} holds NaN or infinity.")
