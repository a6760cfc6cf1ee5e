"""What `gpu_decode_narrow` and `gpu_scales.load` mean, in plain JAX: numbers are where those names say."""

from typing import Any

from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.paged_attention.gpu_key_order import in_key_order


def load_keys(ref: Any) -> Array:
    return ref[...]


def load_values(ref: Any) -> Array:
    return _loaded(ref)


def load_scales(ref: Any, _: int) -> Array:
    return _loaded(ref)


def _loaded(ref: Any) -> Array:
    loaded = ref[...]
    # Each thread tells a barrier itself that the slot is free, after what it has loaded. In the simulator a warpgroup
    # does, whose reads are then not taken to have ended.
    plgpu.commit_smem()
    return loaded


def keys(narrow: Array, dtype: Any) -> Array:
    return in_key_order(narrow.astype(dtype))


def values(narrow: Array, dtype: Any) -> Array:
    head_dim = narrow.shape[1]
    # Of 4 warps' and 8 lanes' columns, the numbers of blocks and of the halves of their rows.
    split = narrow.astype(dtype).T.reshape(4, 8, head_dim // 64, 2, -1)
    return split.transpose(2, 0, 3, 1, 4).reshape(head_dim, -1)


def turned_back(sums: Array) -> Array:
    head_dim = sums.shape[0]
    split = sums.reshape(head_dim // 64, 4, 2, 8, -1)
    return split.transpose(1, 3, 0, 2, 4).reshape(head_dim, -1).T
