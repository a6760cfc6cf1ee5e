"""Code that runs once per device, on the device's own share of each array: inside of `jax.shard_map`."""

import jax
from jax import Array

from hex_llm.parallel.mesh import TENSOR


def is_split() -> bool:
    """Whether what is traced is one device's share of the work."""
    return TENSOR in jax.sharding.get_abstract_mesh().manual_axes


def sum_over_devices(x: Array) -> Array:
    return jax.lax.psum(x, TENSOR)


def join_over_devices(x: Array, *, axis: int, groups: list[list[int]] | None = None) -> Array:
    """The devices' shares of an array, one after the other; of the devices of each group, where there are groups."""
    return jax.lax.all_gather(x, TENSOR, axis=axis, tiled=True, axis_index_groups=groups)


def own_share(x: Array, *, axis: int) -> Array:
    """This device's share of an array that all have whole."""
    size = x.shape[axis] // num_devices()
    return jax.lax.dynamic_slice_in_dim(x, device_index() * size, size, axis)


def num_devices() -> int:
    return jax.lax.axis_size(TENSOR)


def device_index() -> Array:
    return jax.lax.axis_index(TENSOR)
