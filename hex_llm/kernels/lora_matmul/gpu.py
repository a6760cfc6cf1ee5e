"""What adapters add on Hopper, as a part of a chain.

The tokens are multiplied by the first of all pairs in a product like the others, `in` split between as many blocks as
the chip has, and a small kernel adds the parts and keeps what is a token's own. The second of the pairs are more
columns of the weight: its product takes them along. So every kernel still fetches what it needs of the weights and
pairs while the one in front of it runs.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.hopper import num_sms
from hex_llm.kernels.lora_matmul.gpu_own import does_rank, keep_own
from hex_llm.kernels.lora_matmul.weight import Adapted, Own, Pairs
from hex_llm.kernels.matmul import gpu
from hex_llm.kernels.matmul.gpu import More, Plan
from hex_llm.kernels.quant_matmul.weight import Packed


def supports(x: Any, weight: Adapted, *, activation: Activation | None = None) -> bool:
    """Whether `parts` does tokens [M, in] of such a shape and type. Codes have products that know of no pairs."""
    whole, pairs = weight.weight, weight.pairs
    *rows, size = pairs.down.shape
    first = jax.ShapeDtypeStruct((math.prod(rows), size), pairs.down.dtype)
    if isinstance(whole, Packed) or x.dtype != jnp.bfloat16 or not does_rank(rows[-1]):
        return False
    if not gpu.supports(x, first) or not gpu.supports(x, whole, activation=activation):
        return False
    plan = _plan(x.shape[0], weight, activation)
    tile = plan.rows if activation is None else plan.rows // 2
    return _width(pairs) % plan.depth == 0 and not any(up.shape[0] % tile for up in pairs.up)


def narrowed(x: Array, pairs: Pairs, own: Own) -> Array:
    """[M, in] -> [padded(M), parts, slots, rank]: tokens times the first of their own pairs, and zeros."""
    *rows, size = pairs.down.shape
    plan = first_plan(x.shape[0], pairs)
    found = gpu.parts(x, pairs.down.reshape(-1, size), dtype=jnp.dtype(jnp.float32), plan=plan)
    return keep_own(found.reshape(*found.shape[:2], *rows), own.slot, x.dtype)


def parts(x: Array, weight: Adapted, *, activation: Activation | None = None) -> Array:
    """As `matmul.gpu.parts`, with what adapters add."""
    assert not isinstance(weight.weight, Packed), "codes have a product of their own"
    pairs, width = weight.pairs, _width(weight.pairs)
    narrow = narrowed(x, pairs, weight.own)
    more = More(narrow.reshape(narrow.shape[0], -1), tuple(up.reshape(-1, width) for up in pairs.up))
    plan = _plan(x.shape[0], weight, activation)
    return gpu.parts(x, weight.weight, plan=plan, activation=activation, more=more)


def first_plan(tokens: int, pairs: Pairs) -> Plan:
    """Of tokens times the first of all pairs. These are narrow: what many blocks have of them is little to add."""
    *rows, size = pairs.down.shape
    return gpu.plan_for(tokens, math.prod(rows), size, max_splits=num_sms())


def _plan(tokens: int, weight: Adapted, activation: Activation | None) -> Plan:
    """That of the weight alone, but for slots of the ring which all pairs fill."""
    plan = gpu.plan_for(tokens, *weight.shape, gated=activation is not None)
    shallow = _width(weight.pairs) % plan.depth != 0
    return dataclasses.replace(plan, depth=gpu.line(jnp.bfloat16)) if shallow else plan


def _width(pairs: Pairs) -> int:
    """Columns that the second of all pairs are."""
    return math.prod(pairs.up[0].shape[1:])
