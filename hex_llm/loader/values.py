"""Looking for numbers that are none while they are read."""

from typing import Literal

import ml_dtypes
import numpy as np

from hex_llm.errors import CheckpointError
from hex_llm.quantization.method import Tensor

type Check = Literal["sample", "full", "off"]

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_NAN8 = 0x7F  # its bits but for the sign; there is no infinity
_SAMPLED = 65536  # values of each piece that are looked at


def check_finite(tensor: Tensor, piece: np.ndarray, check: Check) -> None:
    """Refuses NaN and infinity. `check` says how many of the values are looked at."""
    if check == "off":
        return
    # Whole rows at even distances: a stride over single values would touch the same pages for less.
    step = max(1, piece.size // _SAMPLED) if check == "sample" else 1
    if not _finite(piece[::step] if piece.ndim else piece).all():
        raise CheckpointError(f"Tensor {tensor.name} in {tensor.path} holds NaN or infinity.")


def _finite(values: np.ndarray) -> np.ndarray:
    if values.dtype == FLOAT8:
        return (values.view(np.uint8) & _NAN8) != _NAN8  # much faster than to ask the numbers
    return np.isfinite(values)
