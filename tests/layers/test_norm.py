import jax.numpy as jnp
import numpy as np

from hex_llm.layers.norm import rms_norm


def test_the_mean_square_becomes_one_and_the_weight_scales_it():
    x = np.random.default_rng(0).normal(size=(5, 64)) * 30
    weight = np.linspace(0.5, 2, 64)
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    out = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 1e-5)
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_bfloat16_is_squared_in_float32():
    """The sum of 4096 squares of bfloat16, in bfloat16, would stop growing at 256."""
    x = jnp.full((1, 4096), 3, jnp.bfloat16)
    out = rms_norm(x, jnp.ones(4096, jnp.bfloat16), 1e-5)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), 1, rtol=1e-2)


def test_zeros_stay_zeros():
    assert not np.asarray(rms_norm(jnp.zeros((2, 8)), jnp.ones(8), 1e-5)).any()
