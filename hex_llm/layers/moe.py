"""A mixture of experts: which of them a token goes to, and what they make of it."""

import functools
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.activation import Activation
from hex_llm.kernels.grouped_matmul import api
from hex_llm.kernels.quant_matmul.weight import Matrix
from hex_llm.layers.linear import linear_float32


class HasExperts(Protocol):
    """What holds the weights of a layer's experts."""

    @property
    def gate_up(self) -> Matrix: ...

    @property
    def gate_up_bias(self) -> Array | None: ...

    @property
    def down(self) -> Matrix: ...

    @property
    def down_bias(self) -> Array | None: ...


def route_softmax(
    x: Array, router: Array, k: int, *, real: Array, renormalised: bool, bias: Array | None = None
) -> tuple[Array, Array]:
    """[T or more, D] -> the k likeliest experts of each token, [T, k] int32, and their probabilities, [T, k] float32.

    `renormalised`, those of a token add up to 1. `real` [T] says which are tokens; see `join_padding`.
    """
    logits = linear_float32(x, router, bias)[: real.shape[0]]
    best, chosen = jax.lax.top_k(logits, k)
    likelihood = jnp.exp(best - best[:, :1])  # the first is the largest
    if renormalised:
        # Written as additions, which fuse into whatever comes next.
        total = functools.reduce(jnp.add, [likelihood[:, j : j + 1] for j in range(k)])
    else:
        total = jnp.sum(jnp.exp(logits - best[:, :1]), axis=1, keepdims=True)
    return join_padding(chosen, real), likelihood / total


def join_padding(chosen: Array, real: Array) -> Array:
    """[T, k] with the experts of the first token, which is always real, in place of those that padding chose: whatever
    is chosen is read from memory."""
    return jnp.where(real[:, None], chosen, chosen[:1]).astype(jnp.int32)


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
