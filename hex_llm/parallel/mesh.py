"""The devices of one engine, in a row along which weights are split."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from hex_llm.launch.placement import check_devices

TENSOR = "tp"


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the first `tensor_parallel_size` of the devices, by default of all that JAX sees."""
    devices = jax.devices() if devices is None else devices
    check_devices(tensor_parallel_size, 1, len(devices))
    first, kind = devices[:tensor_parallel_size], (AxisType.Auto,)
    try:
        return jax.make_mesh((tensor_parallel_size,), (TENSOR,), axis_types=kind, devices=first)
    except AssertionError:  # chips of a TPU that make no rectangle, for which JAX knows no better order than theirs
        return Mesh(np.array(first), (TENSOR,), axis_types=kind)
