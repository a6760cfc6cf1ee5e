from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.layers.moe import experts_bias, experts_mlp, route_softmax

ALL = jnp.ones(5, bool)


def some(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_shares_are_probabilities_over_all_experts():
    x, router = some(5, 8), some(6, 8, seed=1)
    chosen, share = route_softmax(x, router, 3, real=ALL, renormalised=False)
    probability = jax.nn.softmax(x @ router.T, axis=-1)
    want, best = jax.lax.top_k(probability, 3)
    assert chosen.dtype == jnp.int32
    assert (chosen == best).all()
    np.testing.assert_allclose(share, want, rtol=1e-5)


def test_renormalised_shares_add_up_to_one_and_the_router_s_bias_counts():
    x, router, bias = some(5, 8), some(6, 8, seed=1), some(6, seed=2)
    chosen, share = route_softmax(x, router, 2, real=ALL, renormalised=True, bias=bias)
    probability = jax.nn.softmax(x @ router.T + bias[None, :], axis=-1)
    want, best = jax.lax.top_k(probability, 2)
    assert (chosen == best).all()
    np.testing.assert_allclose(share, want / want.sum(axis=1, keepdims=True), rtol=1e-5)


def test_rows_that_are_no_tokens_choose_what_the_first_token_does():
    x, router = some(8, 8), some(6, 8, seed=1)
    whole, _ = route_softmax(x, router, 2, real=jnp.ones(8, bool), renormalised=True)
    chosen, share = route_softmax(x, router, 2, real=jnp.arange(5) < 3, renormalised=True)
    assert chosen.shape == share.shape == (5, 2)
    assert (chosen[:3] == whole[:3]).all()
    assert (chosen[3:] == whole[:1]).all()
    assert not (whole[3:5] == whole[:1]).all()


def test_of_equal_experts_the_first_is_chosen():
    chosen, share = route_softmax(jnp.ones((1, 4)), jnp.ones((5, 4)), 2, real=jnp.ones(1, bool), renormalised=True)
    assert chosen.tolist() == [[0, 1]]
    assert share.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("rows", [3, 8])
def test_each_token_gets_its_experts_by_their_shares(rows):
    experts = SimpleNamespace(
        gate_up=some(4, 12, 8, seed=1),
        gate_up_bias=some(4, 12, seed=3),
        down=some(4, 8, 6, seed=2),
        down_bias=some(4, 8, seed=4),
    )
    x, chosen = some(rows, 8), jnp.asarray([[0, 3], [2, 1], [3, 2]], jnp.int32)
    share = jnp.asarray([[0.7, 0.3], [0.5, 0.5], [0.9, 0.2]], jnp.float32)
    out = experts_mlp(x, experts, chosen, share, activation="silu").sum(axis=0)
    bias = experts_bias(experts, chosen, share)
    assert bias is not None
    for t in range(3):
        want = np.zeros(8)
        for e, weight in zip(chosen[t].tolist(), share[t].tolist(), strict=True):
            both = experts.gate_up[e] @ x[t] + experts.gate_up_bias[e]
            hidden = jax.nn.silu(both[:6]) * both[6:]
            want += weight * np.asarray(experts.down[e] @ hidden + experts.down_bias[e])
        np.testing.assert_allclose(out[t] + bias[t], want, rtol=1e-4, atol=1e-4)


def test_experts_without_a_bias_have_none_to_add():
    experts = SimpleNamespace(gate_up=some(2, 4, 4), gate_up_bias=None, down=some(2, 4, 2), down_bias=None)
    assert experts_bias(experts, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))) is None
