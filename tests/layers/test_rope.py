import math

import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.rope_write.reference import rotate
from hex_llm.layers.rope import LinearScaling, Llama3Scaling, Rope, rope_tables


def turned(x, positions, rope):
    return np.asarray(rotate(jnp.asarray(x, jnp.float32), rope_tables(rope, jnp.asarray(positions, jnp.int32))))


def test_pairs_half_a_head_apart_turn_together():
    x = np.zeros((1, 1, 8))
    x[0, 0, 1] = 1.0  # the pair (1, 5), which turns by 100 ** -(2 / 8) a position
    out = turned(x, [3], Rope(8, 100.0))[0, 0]
    angle = 3 * 100.0**-0.25
    assert out[1] == pytest.approx(math.cos(angle), abs=1e-6)
    assert out[5] == pytest.approx(math.sin(angle), abs=1e-6)
    assert not out[[0, 2, 3, 4, 6, 7]].any()


def test_only_the_distance_of_two_tokens_counts():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 16))
    rope = Rope(16, 10000.0)
    near = (turned(q, [9], rope) * turned(k, [2], rope)).sum()
    far = (turned(q, [507], rope) * turned(k, [500], rope)).sum()
    assert near == pytest.approx(far, abs=1e-3)


def test_large_positions_are_not_rounded():
    positions = [100_000, 100_001]
    cos, _ = rope_tables(Rope(4, 10000.0), jnp.asarray(positions, jnp.int32))
    np.testing.assert_allclose(np.asarray(cos)[:, 0, 0], np.cos(positions), atol=1e-3)


def test_linear_scaling_squeezes_positions():
    x = np.random.default_rng(1).normal(size=(2, 3, 8))
    np.testing.assert_allclose(
        turned(x, [40, 80], Rope(8, 10000.0, LinearScaling(4.0))),
        turned(x, [10, 20], Rope(8, 10000.0)),
        atol=1e-5,
    )


def test_llama3_keeps_fast_waves_slows_slow_ones_and_blends_between():
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    plain, scaled = (Rope(128, 500000.0, s).frequencies() for s in (None, scaling))
    turns = 8192 * plain / (2 * math.pi)
    ratio = scaled / plain
    np.testing.assert_allclose(ratio[turns > 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 1], 1 / 8, rtol=1e-6)
    between = ratio[(turns >= 1) & (turns <= 4)]
    assert len(between) > 2
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (np.diff(between) < 0).all()


def test_llama3_with_equal_factors_divides_by_no_zero():
    scaling = Llama3Scaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position=8192)
    ratio = Rope(128, 500000.0, scaling).frequencies() / Rope(128, 500000.0).frequencies()
    assert set(np.round(ratio, 4)) == {1.0, 0.0625}
