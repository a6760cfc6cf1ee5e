"""What tensors of quantized checkpoints stand for, one number at a time, from how their formats are documented.

Written without a look at how the package does it. Every function takes the tensors of a module by the last words of
their names, and returns its matrix [out, in] in float32.
"""

import json
from collections.abc import Callable

import ml_dtypes
import numpy as np

type Tensors = dict[str, np.ndarray]

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
_FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3]
TABLES = {"nf4": np.float32(NF4), "fp4": np.float32([*_FP4, *(-value for value in _FP4)]) / np.float32(12)}
_MXFP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
MXFP4 = np.float32([*_MXFP4, *(-value for value in _MXFP4)])
AWQ_NIBBLES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def bits_at(words: np.ndarray, shift: np.ndarray, bits: int) -> np.ndarray:
    """A number from each word, as Python's integers."""
    return (words.astype(np.int64) % 2**32) // 2 ** shift.astype(np.int64) % 2**bits


def awq(tensors: Tensors) -> np.ndarray:
    groups, out = tensors["scales"].shape
    size = len(tensors["qweight"])
    row, column = np.indices((out, size))
    group = column // (size // groups)
    shift = 4 * AWQ_NIBBLES[row % 8]
    code = bits_at(tensors["qweight"][column, row // 8], shift, 4)
    zero = bits_at(tensors["qzeros"][group, row // 8], shift, 4)
    return (code - zero).astype(np.float32) * tensors["scales"][group, row].astype(np.float32)


def gptq(tensors: Tensors, bits: int, added: int) -> np.ndarray:
    out, size, per = tensors["scales"].shape[1], len(tensors["g_idx"]), 32 // bits
    row, column = np.indices((out, size))
    group = tensors["g_idx"][column]
    code = bits_at(tensors["qweight"][column // per, row], bits * (column % per), bits)
    zero = bits_at(tensors["qzeros"][group, row // per], bits * (row % per), bits) + added
    return (code - zero).astype(np.float32) * tensors["scales"][group, row].astype(np.float32)


def bnb_int8(tensors: Tensors) -> np.ndarray:
    return tensors["weight"].astype(np.float32) * (tensors["SCB"] / np.float32(127))[:, None]


def bnb_4bit(tensors: Tensors) -> np.ndarray:
    (name,) = (name for name in tensors if ".quant_state." in name)
    state = json.loads(bytes(tensors[name].tolist()))
    data = np.frombuffer(tensors["weight"].tobytes(), np.uint8)
    table, flat = tensors["weight.quant_map"], np.arange(2 * len(data))
    code = np.where(flat % 2 == 0, data[flat // 2] // 16, data[flat // 2] % 16)
    scale = tensors["weight.absmax"]
    if "nested_blocksize" in state:
        outer = tensors["weight.nested_absmax"][np.arange(len(scale)) // state["nested_blocksize"]]
        scale = tensors["weight.nested_quant_map"][scale] * outer + np.float32(state["nested_offset"])
    return (table[code] * scale[flat // state["blocksize"]]).reshape(state["shape"])


def rows_scaled(tensors: Tensors) -> np.ndarray:
    """Of 8 bits, whole numbers or float8, with a scale for each row or one for all."""
    weight, scale = tensors["weight"].astype(np.float32), tensors["weight_scale"].astype(np.float32).reshape(-1, 1)
    if "weight_zero_point" in tensors:
        weight = weight - tensors["weight_zero_point"].astype(np.float32).reshape(-1, 1)
    return weight * scale


def packed(tensors: Tensors, bits: int) -> np.ndarray:
    """pack-quantized of compressed-tensors."""
    out, size = tensors["weight_shape"].tolist()
    per, scale = 32 // bits, tensors["weight_scale"].astype(np.float32).reshape(-1, tensors["weight_scale"].shape[-1])
    row, column = np.indices((out, size))
    of_column = tensors.get("weight_g_idx", np.arange(size) // (size // scale.shape[1]))
    group = of_column[column]
    code = bits_at(tensors["weight_packed"][row, column // per], bits * (column % per), bits)
    zero = 2 ** (bits - 1)
    if "weight_zero_point" in tensors:
        zero = bits_at(tensors["weight_zero_point"][row // per, group], bits * (row % per), bits)
    return (code - zero).astype(np.float32) * scale[row if len(scale) > 1 else 0, group]


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[..., groups, 16] and [..., groups] -> [..., in]."""
    codes = np.stack([blocks % 16, blocks // 16], axis=-1).reshape(*blocks.shape[:-1], 32)
    values = np.take(MXFP4, codes) * np.exp2(scales.astype(np.float64) - 127)[..., None]
    return values.reshape(*blocks.shape[:-2], -1).astype(np.float32)


def e4m3(code: np.ndarray) -> np.ndarray:
    """float8 by its bits: sign, 4 of the exponent, 3 of the fraction."""
    sign, exponent, fraction = code // 128, code // 8 % 16, code % 8
    normal = (1 + fraction / 8) * np.exp2(exponent - 7.0)
    return np.where(sign, -1.0, 1.0) * np.where(exponent == 0, fraction / 8 * 2.0**-6, normal)


def fp8(tensors: Tensors) -> np.ndarray:
    assert tensors["weight"].dtype == ml_dtypes.float8_e4m3fn
    return rows_scaled(tensors | {"weight": e4m3(tensors["weight"].view(np.uint8).astype(np.int64))})


type Decoder = Callable[[Tensors], np.ndarray]
