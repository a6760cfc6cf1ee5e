import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.layers.linear import linear, linear_float32, linear_parts, linear_summed


def arrays(rows, dtype, *, inner=64, outer=32):
    rng = np.random.default_rng(rows)
    x, w, b = (rng.normal(size=shape) for shape in ((rows, inner), (outer, inner), (outer,)))
    return tuple(jnp.asarray(a, dtype) for a in (x, w, b))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_is_multiplied_by_the_transposed_weight(rows, dtype):
    x, w, b = arrays(rows, dtype)
    wide = [np.asarray(a, np.float64) for a in (x, w, b)]
    expected = wide[0] @ wide[1].T + wide[2]
    out = linear(x, w, b)
    assert (out.shape, out.dtype) == ((rows, 32), dtype)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=1e-2, atol=0.1)
    exact = linear_float32(x, w, b)
    assert exact.dtype == jnp.float32
    np.testing.assert_allclose(exact, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_bfloat16_weight_is_not_copied_wider_on_the_cpu(rows):
    """A regression shows as a temporary of twice the weight, and as decoding ten times slower."""
    x, w, _ = arrays(rows, jnp.bfloat16, inner=512, outer=1024)
    memory = jax.jit(linear).lower(x, w).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < w.nbytes / 2


def test_a_product_in_parts_leaves_the_bias_out_and_one_that_is_summed_has_it():
    x, w, b = arrays(3, jnp.float32)
    [parts], [summed], [without] = linear_parts(x, w), linear_summed(x, w, b), linear_summed(x, w)
    np.testing.assert_array_equal(parts, linear(x, w))
    np.testing.assert_array_equal(summed, linear(x, w, b))
    np.testing.assert_array_equal(without, parts)


def test_where_devices_hold_shares_of_a_weight_they_are_summed_and_the_bias_is_added_once():
    """In a process with two devices, since this one has been given its own."""
    command = [sys.executable, "-m", "tests.layers.two_devices"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
