"""A program for test_linear.py: products of which each of two virtual devices holds a share."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "2"
os.environ["NPROC"] = "32"  # with fewer threads than devices need, XLA's CPU backend can wait for itself

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from hex_llm.layers.linear import linear_summed
from hex_llm.layers.mlp import gated_mlp
from hex_llm.parallel.manual import is_split
from hex_llm.parallel.mesh import TENSOR, make_mesh

ALL, ROWS, COLUMNS = PartitionSpec(), PartitionSpec(TENSOR), PartitionSpec(None, TENSOR)


def arrays(dtype, *shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def on_two_devices(function, *specs):
    """With a jit inside, as a layer has."""
    split = jax.shard_map(jax.jit(function), mesh=make_mesh(2), in_specs=specs, out_specs=ALL)
    return jax.jit(split)


def main() -> None:
    for dtype in (jnp.float32, jnp.bfloat16):
        x, weight, bias = arrays(dtype, (5, 64), (32, 64), (32,))
        [got] = on_two_devices(linear_summed, COLUMNS, COLUMNS, ALL)(x, weight, bias)
        [want] = linear_summed(x, weight, bias)
        assert got.dtype == dtype
        # Each share, their sum and the sum with the bias are rounded.
        atol = 1e-5 if dtype == jnp.float32 else 3 * 2.0**-8 * float(jnp.abs(want).max())
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=1e-5, atol=atol)

    x, gate, up, down = arrays(jnp.float32, (5, 8), (12, 8), (12, 8), (8, 12))
    halves = [part for half in range(2) for part in (gate[half * 6 :][:6], up[half * 6 :][:6])]
    [got] = on_two_devices(gated_mlp, ALL, ROWS, COLUMNS)(x, jnp.concatenate(halves), down)
    [want] = gated_mlp(x, jnp.concatenate([gate, up]), down)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

    seen = []
    on_two_devices(lambda x: (seen.append(is_split()), x)[1], ALL)(x)
    assert seen == [True]
    assert not is_split()


if __name__ == "__main__":
    main()
