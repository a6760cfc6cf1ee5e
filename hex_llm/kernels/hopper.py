"""The GPUs that our kernels are made for: H100, H200 and GH200. Others run what XLA makes."""

import math

import jax

from hex_llm.parallel.backend import backend

CAPABILITY = "9.0"
SMS = 132  # of most of them, for compiling where there is none
MMA_ROWS = 64  # of one wgmma, which is the share of a warpgroup
LOG2E = math.log2(math.e)
MOST_BARRIERS = 32  # of one group, which is what Mosaic has, and so the most slots of a ring
# Two int8 numbers of a word, chosen by one of the selectors, as bfloat16: 128 + the low 7 bits, less 128, or 256 where
# the sign is set, which is the last bit of the exponent then.
INT8_TO_BFLOAT16 = "prmt.b32 a, $1, 0x43, {}; and.b32 b, a, 0xff7fff7f; and.b32 c, a, 0xff80ff80; sub.bf16x2 $0, b, c;"
INT8_PAIRS = (0x4140, 0x4342)
SHARED_BYTES = 222 * 1024  # for a ring: of 227 KB, so that a small kernel can stand beside


def is_hopper() -> bool:
    return backend() == "gpu" and getattr(jax.devices()[0], "compute_capability", CAPABILITY) == CAPABILITY


def num_sms() -> int:
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else SMS
