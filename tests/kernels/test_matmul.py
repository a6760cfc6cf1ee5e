"""The GPU's product of a decode batch with a weight against the reference, in a simulator that looks for races."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import chain, hopper
from hex_llm.kernels.matmul import add_norm_gpu, api, gpu, reference
from hex_llm.kernels.matmul.gpu import Plan
from hex_llm.kernels.rms import Rms
from tests.kernels.numbers import normal
from tests.kernels.simulator import simulation

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
    "gate_up of Qwen2.5-7B": (37888, 3584),
    "down of Qwen2.5-7B": (3584, 18944),
    "head of Gemma 2": (256000, 3584),
}


@pytest.fixture
def simulator():
    """A block of a product leaves no barrier before all that was to arrive has arrived."""
    with simulation(all_phases=True):
        yield


def inputs(tokens: int, out: int, size: int) -> tuple[jax.Array, jax.Array]:
    return normal(tokens, tokens, size), normal(out + size, out, size) / 16


def assert_close(got: jax.Array, want: jax.Array) -> None:
    """Equal but for the last bit: the order of the sum differs."""
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-7, atol=1e-4)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "out", "size", "plan"),
    [
        (8, 128, 256, Plan(rows=64, depth=64, slots=2)),
        (1, 384, 256, Plan(rows=64, depth=64, slots=3)),  # six tiles on four blocks
        (3, 640, 320, Plan(rows=64, depth=64, slots=4)),  # the ring is not a whole number of pieces
        (24, 256, 256, Plan(rows=128, depth=128, slots=2)),
        (16, 128, 512, Plan(rows=64, depth=64, splits=2, slots=2)),
        (40, 256, 512, Plan(rows=128, depth=64, splits=4, slots=2)),  # four parts to be added
        (16, 512, 512, Plan(rows=64, depth=64, splits=2, slots=3)),
        (128, 256, 128, Plan(rows=256, depth=64, slots=2)),
        (128, 128, 512, Plan(rows=64, depth=128, splits=2, slots=2)),
    ],
)
def test_the_product_is_the_reference_s(tokens, out, size, plan):
    x, weight = inputs(tokens, out, size)
    plan = dataclasses.replace(plan, blocks=4)
    assert_close(gpu.matmul(x, weight, plan=plan), reference.matmul(x, weight))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "out", "size", "activation"),
    [(8, 256, 256, "silu"), (40, 512, 128, "gelu"), (128, 256, 192, "silu"), (16, 256, 256, "gelu")],
)
def test_the_gated_product_is_the_reference_s(tokens, out, size, activation):
    x, weight = inputs(tokens, out, size)
    plan = Plan(rows=128, depth=64, slots=2, blocks=4)
    assert_close(gpu.gated_matmul(x, weight, activation, plan=plan), reference.gated_matmul(x, weight, activation))


def test_parts_of_sums_are_not_gated():
    x, weight = inputs(8, 128, 256)
    with pytest.raises(AssertionError, match="gates parts of sums"):
        gpu.gated_matmul(x, weight, "silu", plan=Plan(rows=128, depth=64, splits=2))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gate_far_from_zero_closes_or_lets_through(activation):
    gates = jnp.asarray([-3e38, -1e20, -500, -20, 20, 500, 1e19], jnp.bfloat16)
    x = jnp.eye(8, 64, dtype=jnp.bfloat16)
    weight = jnp.zeros((128, 64), jnp.bfloat16).at[0, :7].set(gates).at[64, :7].set(0.5)
    plan = Plan(rows=128, depth=64, slots=2, blocks=1)
    got = gpu.gated_matmul(x, weight, activation, plan=plan)[:7, 0].astype(jnp.float32)
    np.testing.assert_allclose(got, jnp.maximum(gates, 0).astype(jnp.float32) / 2, atol=1e-7)


@pytest.mark.usefixtures("simulator")
def test_logits_are_left_in_float32():
    x, weight = inputs(8, 128, 128)
    got = gpu.matmul(x, weight, dtype=jnp.dtype(jnp.float32), plan=Plan(rows=64, depth=64, slots=2, blocks=4))
    want = reference.matmul(x, weight, dtype=jnp.dtype(jnp.float32))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("simulator")
def test_a_token_s_result_does_not_depend_on_the_others():
    x, weight = inputs(16, 128, 256)
    plan = Plan(rows=64, depth=64, splits=2, slots=2, blocks=4)
    alone = gpu.matmul(jnp.zeros_like(x).at[5].set(x[5]), weight, plan=plan)
    assert (gpu.matmul(x, weight, plan=plan)[5] == alone[5]).all()


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("width", "dtype", "plus_one", "is_normed"),
    [
        (1024, jnp.float32, False, False),
        (1024, jnp.bfloat16, False, False),
        (256, jnp.float32, True, False),  # a thread has two elements
        (1152, jnp.float32, True, True),  # and here nine
        (512, jnp.bfloat16, False, True),
    ],
)
def test_the_parts_of_a_product_are_added_to_the_stream_and_normalised(width, dtype, plus_one, is_normed):
    x, weights = inputs(3, 2, width)
    pieces = 30 * normal(9, 2, 3, width, dtype=dtype)
    rms, inner = Rms(1e-5, plus_one), weights[1] if is_normed else None
    got = add_norm_gpu.add_norm(x, pieces, weights[0], rms, inner=inner)
    for mine, theirs in zip(got, reference.add_norm(x, pieces, weights[0], rms, inner=inner), strict=True):
        assert_close(mine[:3], theirs)


def test_rows_are_normalised_where_threads_have_equal_shares_of_them():
    widths = (896, 1152, 2304, 3072, 3584, 4096, 16384)
    assert all(add_norm_gpu.supports(width) for width in widths)
    assert not add_norm_gpu.supports(2880)
    assert not add_norm_gpu.supports(32768)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64, 128])
def test_a_plan_covers_its_shape_and_fits_a_block(name, tokens):
    out, size = SHAPES[name]
    for gated in (False, True):
        plan = gpu.plan_for(tokens, out, size, gated=gated)
        assert out % plan.rows == 0
        assert size % (plan.depth * plan.splits) == 0
        assert gpu.ring_slots(tokens, plan) >= 4


@pytest.mark.parametrize(("out", "size"), [(64, 64), (128, 192), (1024, 2048), (320, 8192), (152064, 3584)])
def test_there_is_a_plan_for_every_shape_that_is_supported(out, size):
    for tokens in range(1, gpu.MAX_TOKENS + 1):
        plan = gpu.plan_for(tokens, out, size)
        assert out % plan.rows == 0
        assert size % (plan.depth * plan.splits) == 0
        assert gpu.ring_slots(tokens, plan) >= 4


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [8, 64, 128])
def test_no_few_blocks_are_left_alone_with_the_last_of_the_work(name, tokens):
    out, size = SHAPES[name]
    for gated in (False, True):
        plan = gpu.plan_for(tokens, out, size, gated=gated)
        blocks, pieces = plan.blocks or hopper.SMS, out // plan.rows * plan.splits
        last = pieces % blocks or blocks
        assert blocks <= hopper.SMS
        assert pieces <= blocks or last >= hopper.SMS // 2


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("on_gpu")
def test_only_small_batches_of_shapes_and_types_that_the_kernel_does_are_taken():
    for tokens, out, size, dtype in [
        (chain.MAX_TOKENS + 1, 64, 64, jnp.bfloat16),
        (8, 96, 64, jnp.bfloat16),
        (8, 64, 96, jnp.bfloat16),
        (8, 64, 64, jnp.float32),
    ]:
        assert not api.takes(*(a.astype(dtype) for a in inputs(tokens, out, size)))
    assert api.takes(*inputs(chain.MAX_TOKENS, 192, 64))
    assert not api.takes(*inputs(8, 192, 64), activation="silu")
    assert api.takes(*inputs(8, 128, 64), activation="gelu")
    assert not api.takes(*inputs(8, 128, 64), activation="clamped_silu")


def test_nothing_is_taken_on_other_machines():
    assert not api.takes(*inputs(8, 64, 64))


@pytest.mark.usefixtures("on_gpu", "simulator")
def test_a_chain_of_a_few_tokens_has_rows_in_eights():
    x, weight = inputs(3, 128, 512)
    scale = jnp.linspace(0.5, 2, 512, dtype=jnp.bfloat16)
    for got, want in (
        (reference.total(api.parts(x, weight)).astype(x.dtype), reference.matmul(x, weight)),
        (api.gated_matmul(x, weight, "gelu"), reference.gated_matmul(x, weight, "gelu")),
    ):
        assert got.shape == (8, want.shape[1])
        assert_close(got[:3], want)
    pieces = normal(9, 2, 8, 512, dtype=jnp.float32)
    arguments, options = (x, pieces, scale, Rms(1e-5, plus_one=True)), {"inner": scale[::-1]}
    (y, normed), want = api.add_norm(*arguments, **options), reference.add_norm(*arguments, **options)
    assert isinstance(normed, jax.Array)
    assert (y.shape, normed.shape) == ((3, 512), (8, 512))
    assert_close(y, want[0])
    assert_close(normed[:3], want[1])
    assert not normed[3:].any()
