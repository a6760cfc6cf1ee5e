import jax.numpy as jnp
import numpy as np

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
