"""Random weights, made on the devices that hold them, for measurements."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from hex_llm.kernels import float8
from hex_llm.kernels.quant_matmul.layouts import pack
from hex_llm.kernels.quant_matmul.weight import Codes, Coding, Packed, numbers_of
from hex_llm.loader.packed import on_each_device
from hex_llm.models.arch import Arch
from hex_llm.models.few_bits import Local, Quantization, from_shares, kept, local_share
from hex_llm.models.split import Split
from hex_llm.models.weights import WeightSpec, build, specs
from hex_llm.quantization.method import Numbers

_SPREAD = 0.035  # uniform in +-0.035 has the standard deviation of 0.02 that models are born with
# Of codes; of the others, 1.
_LARGEST: dict[Coding, float] = {"int8": 128.0, "int4": 8.0, "fp8": float8.LARGEST, "mxfp4": 6.0}
_INT4_ZERO = 8.0
_INPUT_SCALE = 1 / 16  # of the numbers between layers, those of int8 then go up to 8


def dummy[T](
    model: type[T],
    arch: Arch,
    mesh: Mesh,
    dtype: Any,
    *,
    seed: int = 0,
    quantization: Quantization | None = None,
) -> T:
    """Equal for equal seeds."""
    split = Split.over(arch, mesh)
    number = iter(range(len(specs(model, arch))))

    def make(spec: WeightSpec) -> Any:
        keys = np.uint32(seed), np.uint32(next(number))
        spec, numbers = kept(spec, quantization)
        if numbers is not None:
            return _packed(spec, numbers, split, mesh, np.dtype(dtype), keys)
        value = arch.rms.neutral if spec.neutral else None
        return _program(spec.shape(split), jnp.dtype(dtype), value, spec.sharding(mesh))(*keys)

    return build(model, arch, make)


@functools.cache
def _program(
    shape: tuple[int, ...], dtype: Any, value: float | None, sharding: NamedSharding
) -> Callable[[np.uint32, np.uint32], Array]:
    """One compiled function per shape: layers are alike, so a model has a handful."""

    def fill(seed: Array, number: Array) -> Array:
        if value is not None:
            return jnp.full(shape, value, dtype)
        key = jax.random.fold_in(jax.random.key(seed), number)
        return jax.random.uniform(key, shape, dtype, -_SPREAD, _SPREAD)

    return jax.jit(fill, out_shardings=sharding)


def _packed(
    spec: WeightSpec, numbers: Numbers, split: Split, mesh: Mesh, dtype: np.dtype, keys: tuple[np.uint32, np.uint32]
) -> Packed:
    local = local_share(spec, split, numbers)

    def share(number: int, device: Any) -> Packed:
        return _fill(*jax.device_put((*keys, np.uint32(number)), device), numbers=numbers, local=local, dtype=dtype)

    return from_shares(on_each_device(mesh, share), spec, mesh)


@functools.partial(jax.jit, static_argnames=("numbers", "local", "dtype"))
def _fill(seed: Array, number: Array, device: Array, *, numbers: Numbers, local: Local, dtype: np.dtype) -> Packed:
    shapes, coding = local.codes(numbers), numbers_of(numbers.coding)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), device)
    bits = jax.random.bits(key, shapes.codes.shape, jnp.uint8)
    match coding:
        case "int8":
            codes = jax.lax.bitcast_convert_type(bits, jnp.int8)
        case "fp8":
            codes = ((bits.astype(jnp.float32) / 255 * 2 - 1) * float8.LARGEST).astype(jnp.float8_e4m3fn)
        case _:
            codes = bits & 15
    return pack(
        Codes(
            codes=codes,
            scale=jnp.full(shapes.scale.shape, _SPREAD / _LARGEST.get(coding, 1.0), jnp.float32),
            zero=None if shapes.zero is None else jnp.full(shapes.zero.shape, _INT4_ZERO * (coding == "int4")),
            order=None if shapes.order is None else jnp.arange(local.size, dtype=jnp.int32),
            input_scale=None if shapes.input_scale is None else jnp.float32(_INPUT_SCALE),
            coding=numbers.coding,
        ),
        dtype,
    )
