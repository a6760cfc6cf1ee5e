import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels.rms import Rms, rms_norm
from hex_llm.layers.norm import Stream, add_rms_norm, value


def test_the_mean_square_becomes_one_and_the_weight_scales_it():
    x = np.random.default_rng(0).normal(size=(5, 64)) * 30
    weight = np.linspace(0.5, 2, 64)
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    out = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), Rms(1e-5))
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_bfloat16_is_squared_in_float32():
    """The sum of 4096 squares of bfloat16, in bfloat16, would stop growing at 256."""
    x = jnp.full((1, 4096), 3, jnp.bfloat16)
    out = rms_norm(x, jnp.ones(4096, jnp.bfloat16), Rms(1e-5))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), 1, rtol=1e-2)


def test_zeros_stay_zeros():
    assert not np.asarray(rms_norm(jnp.zeros((2, 8)), jnp.ones(8), Rms(1e-5))).any()


def test_the_parts_of_a_stream_are_added_and_normalised_first_if_it_says_so():
    rng = np.random.default_rng(0)
    x, parts, norm, weight = (rng.normal(size=shape) for shape in ((3, 64), (2, 8, 64), (64,), (64,)))

    def normed(a, scale):
        return a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-5) * (1 + scale)

    rms = Rms(1e-5, plus_one=True)
    added = parts.sum(0)[:3]
    for members, expected in (
        ((x,), x),
        ((x, parts), x + added),
        ((x, parts, norm), x + normed(added, norm)),
    ):
        stream = Stream(*(jnp.asarray(a, jnp.float32) for a in members))
        np.testing.assert_allclose(value(stream, rms), expected, rtol=1e-5, atol=1e-5)
        y, h = add_rms_norm(stream, jnp.asarray(weight, jnp.float32), rms)
        assert isinstance(h, jax.Array)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(h, normed(expected, weight), rtol=1e-5, atol=1e-5)


def test_the_sum_of_parts_is_rounded_before_it_is_normalised():
    """As it would be if a product had given it whole."""
    rng = np.random.default_rng(0)
    parts = jnp.asarray(rng.normal(size=(2, 4, 512)), jnp.float32)
    x, norm, rms = jnp.zeros((4, 512), jnp.bfloat16), jnp.ones(512, jnp.bfloat16), Rms(1e-5)
    rounded = parts.sum(0, keepdims=True).astype(jnp.bfloat16)
    np.testing.assert_array_equal(value(Stream(x, parts, norm), rms), value(Stream(x, rounded, norm), rms))
