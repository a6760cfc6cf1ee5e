"""The GPUs that our kernels are made for: H100, H200 and GH200. Others run what XLA makes."""

import math

import jax

from hex_llm.parallel.backend import backend

CAPABILITY = "9.0"
SMS = 132  # of most of them, for compiling where there is none
MMA_ROWS = 64  # of one wgmma, which is the share of a warpgroup
LOG2E = math.log2(math.e)


def is_hopper() -> bool:
    return backend() == "gpu" and getattr(jax.devices()[0], "compute_capability", CAPABILITY) == CAPABILITY


def num_sms() -> int:
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else SMS
