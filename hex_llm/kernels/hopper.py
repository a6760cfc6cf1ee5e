"""The GPUs that our kernels are made for: H100, H200 and GH200. Others run what XLA makes."""

import math

import jax

from hex_llm.parallel.backend import backend

CAPABILITY = "9.0"
SMS = 132  # of most of them, for compiling where there is none
MMA_ROWS = 64  # of one wgmma, which is the share of a warpgroup
LOG2E = math.log2(math.e)
MOST_BARRIERS = 32  # of one group, which is what Mosaic has, and so the most slots of a ring
SHARED_BYTES = 222 * 1024  # for a ring: of 227 KB, so that a small kernel can stand beside


def is_hopper() -> bool:
    return backend() == "gpu" and getattr(jax.devices()[0], "compute_capability", CAPABILITY) == CAPABILITY


def num_sms() -> int:
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else SMS
