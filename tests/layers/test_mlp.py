import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.layers.mlp import gated_mlp


def test_the_gate_comes_first_and_biases_are_added():
    rng = np.random.default_rng(0)
    x, gate, up, down = (rng.normal(size=shape) for shape in ((3, 8), (6, 8), (6, 8), (8, 6)))
    gate_bias, up_bias, down_bias = rng.normal(size=6), rng.normal(size=6), rng.normal(size=8)
    g = x @ gate.T + gate_bias
    expected = (g / (1 + np.exp(-g)) * (x @ up.T + up_bias)) @ down.T + down_bias
    arrays = (x, np.concatenate([gate, up]), down, np.concatenate([gate_bias, up_bias]), down_bias)
    [out] = gated_mlp(*(jnp.asarray(a, jnp.float32) for a in arrays))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["gelu", "clamped_silu"])
def test_the_gate_is_bent_as_the_model_says(activation):
    rng = np.random.default_rng(0)
    x, gate, up, down = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 8), (6, 8), (6, 8), (8, 6)))
    g, u = x @ gate.T, x @ up.T
    hidden = {
        "gelu": jax.nn.gelu(g, approximate=True) * u,
        "clamped_silu": jnp.minimum(g, 7) / (1 + jnp.exp(-1.702 * jnp.minimum(g, 7))) * (jnp.clip(u, -7, 7) + 1),
    }[activation]
    [out] = gated_mlp(x, jnp.concatenate([gate, up]), down, activation=activation)
    np.testing.assert_allclose(out, hidden @ down.T, rtol=1e-4, atol=1e-4)
