"""Warpgroups that share a row share no memory but their own: Mosaic reduces an array to one number through a place that
is the same for all of a block, and the simulator has no such place."""

import re

import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels import gpu_parts
from hex_llm.kernels.matmul.add_norm_gpu import add_norm
from hex_llm.kernels.paged_attention.gpu_decode_merge_rows import merge_rows
from hex_llm.kernels.paged_attention.gpu_decode_plan import DecodePlan
from hex_llm.kernels.quant_matmul import gpu_rows
from hex_llm.kernels.quant_matmul.rows import EightBits
from hex_llm.kernels.rms import Rms
from tests.kernels.test_gpu_lowering import array, lowered
from tests.kernels.test_merge_rows import sizes_for

WIDTH = 4096
HOW = (EightBits(None, "float8_e4m3fn", with_sums=True), EightBits(None, "float8_e4m3fn"), EightBits(None, "int8"))


def quantize(how):
    return lambda x: gpu_rows.quantize(x, how), array(64, WIDTH, dtype=jnp.bfloat16)


def norm(how):
    arrays = array(64, WIDTH, dtype=jnp.bfloat16), array(2, 64, WIDTH, dtype=jnp.float32)
    return lambda x, pieces: add_norm(x, pieces, x[0], Rms(1e-5), inner=x[1], eight_bits=how), *arrays


def merge(how):
    sizes = sizes_for(70, 8, 4, 128)
    parts = sizes.rows, sizes.max_chunks

    def merged(averages, exponents, queue):
        plan = DecodePlan(queue, jnp.zeros((1, 2), jnp.int32))
        return merge_rows(averages, exponents, plan, sizes, 72, None, how)

    return merged, array(*parts, 4, 128, dtype=jnp.float32), array(*parts, 64, dtype=jnp.float32), array(71, 4)


@pytest.fixture
def modules(monkeypatch):
    """What is lowered, as Mosaic has it."""
    found = []

    def lower(*arguments, **options):
        result = lower_jaxpr(*arguments, **options)
        found.append(str(result.module))
        return result

    lower_jaxpr = lowering.lower_jaxpr_to_module
    monkeypatch.setattr(lowering, "lower_jaxpr_to_module", lower)
    return found


@pytest.mark.parametrize(
    ("kernel", "how"), [*((kernel, how) for kernel in (quantize, norm, merge) for how in HOW), (norm, None)]
)
def test_their_memory_is_what_they_tell_each_other_and_a_barrier(modules, kernel, how):
    lowered(*kernel(how))
    (module,) = modules
    told, *others = sorted(re.findall(r"memref\.view .* to memref<(\S+), ", module))
    turns = 3 if kernel is norm else 1
    assert told == f"{turns}x{gpu_parts.MOST}x4xf32"
    assert others == [f"{turns}xi64"]


def test_a_reduction_to_one_number_takes_memory_of_the_block_s(modules):
    """That the test above can fail."""

    def reduced(x):
        def body(x_ref, out_ref):
            lines = plgpu.load(x_ref, layout=row.layout, optimized=False)
            out_ref[0] = jnp.max(jnp.max(lines, axis=1), axis=0)

        row = gpu_rows.held(512, None, (1,))
        one = array(1, dtype=jnp.float32)
        return plgpu.kernel(body, out_type=one, num_threads=2, thread_name="part")(x.reshape(row.shape))

    lowered(reduced, array(512, dtype=jnp.float32))
    assert re.findall(r"memref\.view .* to memref<(\S+), ", modules[0]) == ["4xf32"]
