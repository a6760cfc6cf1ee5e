"""A mixture of experts: which of them a token goes to, and what they make of it."""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.grouped_matmul import api
from hex_llm.layers.linear import linear_float32
from hex_llm.pytree import pytree


class HasExperts(Protocol):
    """What holds the weights of a layer's experts."""

    @property
    def gate_up(self) -> Array: ...

    @property
    def gate_up_bias(self) -> Array | None: ...

    @property
    def down(self) -> Array: ...

    @property
    def down_bias(self) -> Array | None: ...


@pytree
class Experts:
    gate_up: Array  # [E, 2F, D], the gate's rows first
    down: Array  # [E, D, F]
    gate_up_bias: Array | None = None  # [E, 2F]
    down_bias: Array | None = None  # [E, D]


def route_softmax(
    x: Array, router: Array, k: int, *, renormalised: bool, bias: Array | None = None, tokens: int | None = None
) -> tuple[Array, Array]:
    """[T, D] -> the k likeliest experts of each token, [T, k] int32, and their probabilities, [T, k] float32.

    `renormalised`, those of a token add up to 1. Where `x` has more rows than there are tokens, say `tokens`: whatever
    is chosen is computed, and the rows beyond would choose, too.
    """
    logits = linear_float32(x, router, bias)[:tokens]
    best, chosen = jax.lax.top_k(logits, k)
    likelihood = jnp.exp(best - best[:, :1])  # the first is the largest
    if renormalised:
        # Written as additions, which fuse into whatever comes next.
        total = functools.reduce(jnp.add, [likelihood[:, j : j + 1] for j in range(k)])
    else:
        total = jnp.sum(jnp.exp(logits - best[:, :1]), axis=1, keepdims=True)
    return chosen.astype(jnp.int32), likelihood / total


def experts_mlp(x: Array, experts: HasExperts, chosen: Array, share: Array, *, activation: Activation) -> Array:
    """[T or more, D] -> [n, T or more, D], to be added; rows past T, which is what `chosen` [T, k] has, mean nothing.

    The sum is share[t, j] * down[e] @ gated(gate, up), over the experts e = chosen[t, j] of a token. The bias of `down`
    is not in it: where each device has a share of F, the sum over devices would have it many times. `experts_bias` is
    what to add after that sum.
    """
    return api.experts(x, experts.gate_up, experts.gate_up_bias, experts.down, chosen, share, activation=activation)


def experts_bias(experts: HasExperts, chosen: Array, share: Array) -> Array | None:
    """[T, D] float32: the biases of `down` of each token's experts, each times its share, added; None without any."""
    if experts.down_bias is None:
        return None
    num_experts = experts.down_bias.shape[0]
    weight = jnp.sum(jax.nn.one_hot(chosen, num_experts, dtype=jnp.float32) * share[:, :, None], axis=1)
    return jnp.matmul(weight, experts.down_bias.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
