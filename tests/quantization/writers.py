"""Models in every quantized format, rounded to the nearest: packers in numpy, from how the formats are documented."""

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from hex_llm.loader.checkpoint import open_checkpoint
from tests.quantization import decoders
from tests.quantization.decoders import Decoder, Tensors

LARGEST_FP8 = 448
KEPT = ("embed_tokens", "lm_head", "gate", "router", "norm")


@dataclass(frozen=True)
class Kind:
    """A format: what a config says of it, how a matrix is packed, and what it then stands for."""

    config: dict[str, Any]
    pack: Callable[[np.ndarray, str], Tensors]  # of a module's weight and its name
    decode: Decoder


def write(source: Path, target: Path, kind: Kind, only: str = "") -> Path:
    """A model's folder with all linear modules but the head and routers in a format, of those that have `only` in their
    names."""
    shutil.copytree(source, target)
    tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if value.ndim == 2 and module.rpartition(".")[2] not in KEPT and only in module:
            packed = kind.pack(value.astype(np.float32), module)
            tensors |= {f"{module}.{last}": np.ascontiguousarray(each) for last, each in packed.items()}
        else:
            tensors[name] = value
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": kind.config}))
    return target


def plain(source: Path, target: Path, kind: Kind) -> Path:
    """The model that a quantized one stands for, in float32."""
    shutil.copytree(source, target)
    modules: dict[str, Tensors] = {}
    for name, tensor in open_checkpoint(source).items():  # safetensors' own reader does not know float8
        module, last = split(name)
        modules.setdefault(module, {})[last] = np.asarray(tensor[()])
    found = {}
    for module, parts in modules.items():
        if parts.keys() <= {"weight", "bias"}:
            found |= {f"{module}.{last}": value.astype(np.float32) for last, value in parts.items()}
        else:
            found[f"{module}.weight"] = kind.decode(parts)
    save_file(found, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def split(name: str) -> tuple[str, str]:
    """A tensor's module, and the rest of its name."""
    for mark in (".weight.", ".weight"):
        if mark in name:
            module, _, rest = name.partition(mark)
            return module, (mark[1:] + rest)
    module, _, last = name.rpartition(".")
    return module, last


# Rounding


def grouped(weight: np.ndarray, group: int | None) -> np.ndarray:
    return weight.reshape(len(weight), -1, group or weight.shape[1])


def with_zeros(weight: np.ndarray, group: int | None, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [out, in] from 0 on; scales and zeros [out, groups]."""
    parts, last = grouped(weight, group), 2**bits - 1
    low, high = np.minimum(parts.min(axis=2), 0), np.maximum(parts.max(axis=2), 0)
    scale = np.maximum((high - low) / last, 1e-6).astype(np.float16).astype(np.float32)
    zero = np.clip(np.rint(-low / scale), 0, last)
    codes = np.clip(np.rint(parts / scale[..., None]) + zero[..., None], 0, last)
    return codes.reshape(weight.shape).astype(np.int64), scale, zero.astype(np.int64)


def symmetric(weight: np.ndarray, group: int | None, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same, with the middle as the zero of all."""
    parts, middle = grouped(weight, group), 2 ** (bits - 1)
    scale = np.maximum(np.abs(parts).max(axis=2) / (middle - 0.5), 1e-6).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(parts / scale[..., None]) + middle, 0, 2 * middle - 1)
    return codes.reshape(weight.shape).astype(np.int64), scale, np.full(scale.shape, middle)


def rounded(weight: np.ndarray, group: int | None, bits: int, zeros: bool) -> tuple[np.ndarray, ...]:
    return (with_zeros if zeros else symmetric)(weight, group, bits)


def sorted_groups(module: str, size: int, group: int) -> np.ndarray:
    """The group of each column, equal for all modules that have the same input."""
    block, _, last = module.rpartition(".")
    kind = "in" if last in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3") else last
    rng = np.random.default_rng(zlib.crc32(f"{block}.{kind}".encode()))
    return rng.permutation(np.arange(size) // group).astype(np.int32)


def words(codes: np.ndarray, bits: int, axis: int, nibbles: np.ndarray | None = None) -> np.ndarray:
    """Numbers along an axis into int32."""
    codes, per = np.moveaxis(codes, axis, -1), 32 // bits
    places = np.arange(per) if nibbles is None else nibbles
    parts = codes.reshape(*codes.shape[:-1], -1, per).astype(np.uint64) << (bits * places).astype(np.uint64)
    return np.moveaxis(parts.sum(axis=-1).astype(np.uint32).view(np.int32), -1, axis)


# Packing


def awq(weight: np.ndarray, module: str, group: int | None) -> Tensors:
    codes, scale, zero = with_zeros(weight, group, 4)
    return {
        "qweight": words(codes.T, 4, 1, decoders.AWQ_NIBBLES),
        "qzeros": words(zero.T, 4, 1, decoders.AWQ_NIBBLES),
        "scales": scale.T.astype(np.float16),
    }


def gptq(
    weight: np.ndarray, module: str, bits: int, group: int | None, zeros: bool, subtracted: int, sorts: bool
) -> Tensors:
    size = weight.shape[1]
    g_idx = (np.arange(size) // (group or size)).astype(np.int32)
    if sorts:
        g_idx = sorted_groups(module, size, group or size)
    order = np.argsort(g_idx, kind="stable")
    codes, scale, zero = rounded(weight[:, order], group, bits, zeros)
    if zeros:
        zero = np.maximum(zero, subtracted)  # the first version has no zero of 0
    codes = codes[:, np.argsort(order)]
    return {
        "qweight": words(codes.T, bits, 0),
        "qzeros": words(zero.T - subtracted, bits, 1),
        "scales": scale.T.astype(np.float16),
        "g_idx": g_idx,
    }


def bnb_int8(weight: np.ndarray, module: str) -> Tensors:
    largest = np.maximum(np.abs(weight).max(axis=1), 1e-6).astype(np.float32)
    codes = np.rint(weight * (127 / largest)[:, None]).astype(np.int8)
    return {"weight": codes, "SCB": largest, "weight_format": np.zeros((), np.uint8)}


def bnb_4bit(weight: np.ndarray, module: str, table: str, nested: bool, storage: Any) -> Tensors:
    blocks, values = weight.reshape(-1, 64), decoders.TABLES[table]
    scale = np.maximum(np.abs(blocks).max(axis=1), 1e-6).astype(np.float32)
    codes = np.abs((blocks / scale[:, None])[..., None] - values).argmin(axis=-1).astype(np.uint8).reshape(-1)
    state: dict[str, Any] = {"quant_type": table, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    found = {
        "weight": (codes[0::2] * 16 + codes[1::2]).view(storage).reshape(-1, 1),
        "weight.absmax": scale,
        "weight.quant_map": values,
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(scale.mean())}
        rest = scale - scale.mean()
        padded = np.concatenate([rest, np.zeros(-len(rest) % 256, np.float32)]).reshape(-1, 256)
        outer = np.maximum(np.abs(padded).max(axis=1), 1e-6).astype(np.float32)
        levels = np.linspace(-1, 1, 256, dtype=np.float32)
        inner = np.abs((padded / outer[:, None])[..., None] - levels).argmin(axis=-1).reshape(-1)[: len(rest)]
        found |= {
            "weight.absmax": inner.astype(np.uint8),
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": levels,
        }
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return found | {f"weight.quant_state.bitsandbytes__{table}": text}


def fp8(weight: np.ndarray, module: str, rows: bool, static: bool, shape: tuple[int, ...] = (1,)) -> Tensors:
    largest = np.abs(weight).max(axis=1, keepdims=True) if rows else np.abs(weight).max().reshape(shape)
    scale = np.maximum(largest / LARGEST_FP8, 1e-6).astype(np.float32)
    codes = np.clip(weight / (scale if rows else scale.reshape(())), -LARGEST_FP8, LARGEST_FP8)
    found = {"weight": codes.astype(ml_dtypes.float8_e4m3fn), "weight_scale": scale}
    return found | ({"input_scale": np.full(shape, input_scale(module), np.float32)} if static else {})


def input_scale(module: str) -> float:
    """Each module's own. About as large as numbers between layers are, so that nothing is cut off and little lost."""
    return 0.05 + zlib.crc32(module.encode()) % 1000 / 20000


def int8_rows(weight: np.ndarray, module: str, zeros: bool, static: bool = False) -> Tensors:
    codes, scale, zero = rounded(weight, None, 8, zeros)
    found = {"weight": (codes - 128).astype(np.int8), "weight_scale": scale.astype(ml_dtypes.bfloat16)}
    found |= {"input_scale": np.full(1, input_scale(module), np.float32)} if static else {}
    return found | ({"weight_zero_point": (zero - 128).astype(np.int8)} if zeros else {})


def packed(
    weight: np.ndarray,
    module: str,
    bits: int,
    group: int | None,
    zeros: bool = False,
    sorts: bool = False,
    static: bool = False,
) -> Tensors:
    size = weight.shape[1]
    g_idx = sorted_groups(module, size, group) if sorts and group else np.arange(size, dtype=np.int32)
    order = np.argsort(g_idx, kind="stable")
    codes, scale, zero = rounded(weight[:, order], group, bits, zeros)
    codes = codes[:, np.argsort(order)]
    found = {
        "weight_packed": words(codes, bits, 1),
        "weight_scale": scale.astype(np.float16),
        "weight_shape": np.array(weight.shape, np.int64),
    }
    found |= {"weight_zero_point": words(zero, bits, 0)} if zeros else {}
    found |= {"input_scale": np.full(1, input_scale(module), np.float32)} if static else {}
    return found | ({"weight_g_idx": g_idx} if sorts else {})


# What configs say


def gptq_kind(bits: int, group: int | None, *, zeros: bool = False, version: str = "gptq", sorts: bool = False) -> Kind:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": not zeros,
        "desc_act": sorts,
        "checkpoint_format": version,
        "damp_percent": 0.01,
        "true_sequential": True,
    }
    shift = {"gptq": 1, "gptq_v2": 0}[version]
    pack = partial(gptq, bits=bits, group=group, zeros=zeros, subtracted=shift, sorts=sorts)
    return Kind(config, pack, partial(decoders.gptq, bits=bits, added=shift))


def bnb_kind(table: str | None, *, nested: bool = False, storage: str = "uint8") -> Kind:
    config = {
        "quant_method": "bitsandbytes",
        "load_in_8bit": table is None,
        "load_in_4bit": table is not None,
        "bnb_4bit_quant_type": table or "fp4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": storage,
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": None,
    }
    if table is None:
        return Kind(config, bnb_int8, decoders.bnb_int8)
    kind = ml_dtypes.bfloat16 if storage == "bfloat16" else np.dtype(storage)
    return Kind(config, partial(bnb_4bit, table=table, nested=nested, storage=kind), decoders.bnb_4bit)


def compressed_kind(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, pack: Callable, decode: Decoder
) -> Kind:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
    }
    return Kind(config, pack, decode)


def numbers(bits: int, kind: str, strategy: str, **others: Any) -> dict[str, Any]:
    common = {"symmetric": True, "dynamic": False, "group_size": None, "observer": "minmax", "observer_kwargs": {}}
    return common | {"num_bits": bits, "type": kind, "strategy": strategy} | others


def words_kind(
    bits: int,
    group: int | None,
    *,
    zeros: bool = False,
    sorts: bool = False,
    inputs: dict[str, Any] | None = None,
) -> Kind:
    weights = numbers(bits, "int", "group" if group else "channel", group_size=group, symmetric=not zeros)
    weights |= {"actorder": "group"} if sorts else {}
    static = inputs is not None and not inputs["dynamic"]
    pack = partial(packed, bits=bits, group=group, zeros=zeros, sorts=sorts, static=static)
    return compressed_kind("pack-quantized", weights, inputs, pack, partial(decoders.packed, bits=bits))


STATIC = numbers(8, "float", "tensor")
DYNAMIC = numbers(8, "float", "token", dynamic=True)
TOKENS = numbers(8, "int", "token", dynamic=True)
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
AUTO_FP8 = {"quant_method": "fp8", "ignored_layers": ["lm_head"]}

KINDS: dict[str, Kind] = {
    "awq": Kind(AWQ | {"group_size": 128}, partial(awq, group=128), decoders.awq),
    "awq of 32": Kind(AWQ | {"group_size": 32}, partial(awq, group=32), decoders.awq),
    "awq of rows": Kind(AWQ | {"group_size": -1}, partial(awq, group=None), decoders.awq),
    "gptq 4": gptq_kind(4, 128),
    "gptq 4 zeros": gptq_kind(4, 64, zeros=True),
    "gptq 4 v2 zeros": gptq_kind(4, 64, zeros=True, version="gptq_v2"),
    "gptq 4 sorted": gptq_kind(4, 32, sorts=True),
    "gptq 8": gptq_kind(8, 128),
    "gptq 8 zeros": gptq_kind(8, 32, zeros=True),
    "gptq 8 v2 sorted": gptq_kind(8, 64, version="gptq_v2", sorts=True),
    "gptq 8 of rows": gptq_kind(8, None, zeros=True, version="gptq_v2"),
    "bitsandbytes int8": bnb_kind(None),
    "bitsandbytes nf4": bnb_kind("nf4"),
    "bitsandbytes nf4 nested": bnb_kind("nf4", nested=True),
    "bitsandbytes fp4": bnb_kind("fp4"),
    "bitsandbytes fp4 nested": bnb_kind("fp4", nested=True, storage="bfloat16"),
    "float-quantized static": compressed_kind(
        "naive-quantized", STATIC, STATIC, partial(fp8, rows=False, static=True), decoders.fp8
    ),
    "float-quantized dynamic": compressed_kind(
        "float-quantized", numbers(8, "float", "channel"), DYNAMIC, partial(fp8, rows=True, static=False), decoders.fp8
    ),
    "pack-quantized 4": words_kind(4, 128),
    "pack-quantized 4 zeros": words_kind(4, 64, zeros=True),
    "pack-quantized 4 of rows": words_kind(4, None),
    "pack-quantized 4 sorted": words_kind(4, 32, sorts=True),
    "pack-quantized 4 float8": words_kind(4, 128, inputs=DYNAMIC),
    "pack-quantized 4 float8 static": words_kind(4, None, zeros=True, inputs=STATIC),
    "pack-quantized 8": words_kind(8, 128),
    "pack-quantized 8 zeros": words_kind(8, None, zeros=True),
    "int-quantized": compressed_kind(
        "int-quantized", numbers(8, "int", "channel"), TOKENS, partial(int8_rows, zeros=False), decoders.rows_scaled
    ),
    "int-quantized zeros": compressed_kind(
        "int-quantized",
        numbers(8, "int", "channel", symmetric=False),
        TOKENS,
        partial(int8_rows, zeros=True),
        decoders.rows_scaled,
    ),
    "int-quantized static": compressed_kind(
        "int-quantized",
        numbers(8, "int", "channel"),
        numbers(8, "int", "tensor"),
        partial(int8_rows, zeros=False, static=True),
        decoders.rows_scaled,
    ),
    "int-quantized of 16": compressed_kind(
        "int-quantized", numbers(8, "int", "channel"), None, partial(int8_rows, zeros=False), decoders.rows_scaled
    ),
    "fp8 static": Kind(
        AUTO_FP8 | {"activation_scheme": "static"}, partial(fp8, rows=False, static=True, shape=()), decoders.fp8
    ),
    "fp8 dynamic": Kind(
        AUTO_FP8 | {"activation_scheme": "dynamic"}, partial(fp8, rows=False, static=False, shape=()), decoders.fp8
    ),
    "fbgemm_fp8": Kind(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        partial(fp8, rows=True, static=False),
        decoders.fp8,
    ),
}
