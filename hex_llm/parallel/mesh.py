"""The devices of one engine, in a row along which weights are split."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from hex_llm.launch.placement import check_devices

TENSOR = "tp"


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the first `tensor_parallel_size` of the devices, by default of all that JAX sees."""
    devices = jax.devices() if devices is None else devices
    check_devices(tensor_parallel_size, 1, len(devices))
    return jax.make_mesh(
        (tensor_parallel_size,),
        (TENSOR,),
        axis_types=(AxisType.Auto,),
        devices=devices[:tensor_parallel_size],
    )
