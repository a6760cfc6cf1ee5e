"""The simulator sees what can go wrong between a product and the shared memory that it reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.kernels.simulator import simulation

SIZE, STEPS = 64, 4
FAULTS = (
    "a place given back before its product",
    "a place given back before its product has ended",
    "a place given back when all but the last product have ended",
    "a product before its copy",
    "a product before its commit",
    "another block's result",
)


def total(a, b, fault=None):
    """The sum of the products of [STEPS, SIZE, SIZE] pairs, as each of two blocks finds it."""

    def body(a_ref, b_ref, out_ref, a_smem, b_smem, full, empty):
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _memory():
            @pl.loop(0, STEPS)
            def _(step):
                pl.when(step > 0)(lambda: plgpu.barrier_wait(empty))
                plgpu.copy_gmem_to_smem(a_ref.at[step], a_smem, full)
                plgpu.copy_gmem_to_smem(b_ref.at[step], b_smem, full)

            plgpu.barrier_wait(empty)

        @pl.when(warpgroup == 1)
        def _compute():
            def accumulate(sum_ref):
                @pl.loop(0, STEPS)
                def _(step):
                    if fault != "a product before its copy":
                        plgpu.barrier_wait(full)
                        b_smem[...] = b_smem[...] + b_smem[...]
                    if fault != "a product before its commit":
                        plgpu.commit_smem()
                    if fault == "a place given back before its product":
                        plgpu.barrier_arrive(empty)
                    plgpu.wgmma(sum_ref, a_smem, b_smem)
                    if fault == "a place given back before its product has ended":
                        plgpu.barrier_arrive(empty)
                    plgpu.wgmma_wait(fault == "a place given back when all but the last product have ended")
                    if fault == "a product before its copy":
                        plgpu.barrier_wait(full)
                    if fault == "a product before its commit":
                        plgpu.commit_smem()
                    if not (fault or "").startswith("a place given back before"):
                        plgpu.barrier_arrive(empty)

                return sum_ref[...]

            result = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((SIZE, SIZE), jnp.float32))
            out_ref[0 if fault == "another block's result" else block] = result

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, SIZE, SIZE), jnp.float32),
        grid=(2,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((SIZE, SIZE), jnp.bfloat16),
            plgpu.SMEM((SIZE, SIZE), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(),
        ],
    )(a, b)


@pytest.fixture
def pairs():
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.integers(-2, 3, (STEPS, SIZE, SIZE)), jnp.bfloat16) for _ in range(2))


def test_products_are_added_without_a_race(pairs):
    with simulation(all_phases=True):
        got = total(pairs[0], pairs[1])
    a, b = (np.asarray(each, np.float32) for each in pairs)
    np.testing.assert_array_equal(got, np.stack([2 * (a @ b).sum(axis=0)] * 2))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_race_is_seen(pairs, fault):
    with pytest.raises(AssertionError, match="saw a race"), simulation():
        total(pairs[0], pairs[1], fault).block_until_ready()
