"""Mixtral: a Llama with experts in place of its mlp, of which each token takes the two likeliest."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.matmul.reference import total
from hex_llm.layers.linear import summed
from hex_llm.layers.moe import experts_bias, experts_mlp, route_softmax
from hex_llm.model_fields import Fields
from hex_llm.models import llama
from hex_llm.models.arch import Arch
from hex_llm.models.read import read_arch, windowed
from hex_llm.models.weights import Matrix, Weight, fused, nested, repeated, tensor
from hex_llm.pytree import pytree

GATE_UP_ROWS = ("mlp", "mlp")
_MOST_EXPERTS = 4096  # a bound, so that a damaged config is refused rather than gone through


@pytree
class Moe:
    router: Weight = tensor("gate.weight", "expert embed")
    gate_up: Matrix = fused(("experts.{}.w1.weight", "experts.{}.w3.weight"), GATE_UP_ROWS, "embed", stack="tensors")
    down: Matrix = fused(("experts.{}.w2.weight",), ("embed",), "mlp", stack="tensors")

    router_bias = gate_up_bias = down_bias = None
    first = None  # the router reads the tokens as well


@pytree
class Layer(llama.Layer):
    mlp: Moe = nested(Moe, "block_sparse_moe.")


@pytree
class Mixtral(llama.Llama):
    layers: tuple[Layer, ...] = repeated(Layer, "model.layers.{}.")


def sparse(x: Array, weights: Moe, arch: Arch, batch: Batch) -> Array:
    """[T or more, D] -> [n, T or more, D], to be added; rows past T mean nothing."""
    chosen, share = route_softmax(
        x,
        weights.router,
        arch.experts_per_token,
        real=batch.real,
        renormalised=arch.renormalised,
        bias=weights.router_bias,
    )
    parts = summed(experts_mlp(x, weights, chosen, share, activation=arch.activation), x.dtype)
    bias = experts_bias(weights, chosen, share)
    return parts if bias is None else (total(parts)[: len(chosen)].astype(jnp.float32) + bias).astype(x.dtype)[None]


layer = partial(llama.layer, feed_forward=sparse)


def read_mixtral(fields: Fields) -> Arch:
    """With the defaults of transformers' MixtralConfig."""
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return read_arch(
        fields,
        "MixtralForCausalLM",
        num_kv_heads=8,
        theta=1e6,
        eps=1e-5,
        kinds=windowed(window),
        **read_experts(fields, "num_local_experts", 8, 2),
    )


def read_experts(fields: Fields, name: str, number: int, per_token: int) -> dict[str, Any]:
    """How many experts there are, under their `name`, and how many of them a token takes."""
    num_experts = fields.integer(name, fields.integer("num_local_experts", number), largest=_MOST_EXPERTS)
    taken = fields.integer("num_experts_per_tok", per_token)
    if taken > num_experts:
        raise fields.refuse("num_experts_per_tok", f"is {taken}, more than the {num_experts} experts")
    return {"num_experts": num_experts, "experts_per_token": taken}
