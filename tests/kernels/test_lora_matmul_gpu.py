"""Products with adapters in a chain on Hopper against the reference, in a simulator that looks for races."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import hopper
from hex_llm.kernels.activation import gated
from hex_llm.kernels.lora_matmul import api, gpu, reference
from hex_llm.kernels.lora_matmul.gpu_own import keep_own
from hex_llm.kernels.lora_matmul.weight import Adapted, Own, Pairs
from hex_llm.kernels.matmul import gpu as matmul_gpu
from hex_llm.kernels.matmul import reference as matmul_reference
from hex_llm.kernels.matmul.gpu import Plan
from hex_llm.kernels.matmul.reference import total
from hex_llm.layers.mlp import gated_mlp
from hex_llm.models.adapters import whose
from tests.kernels.numbers import normal
from tests.kernels.simulator import simulation

BF16 = jnp.bfloat16


@pytest.fixture
def simulator():
    """A block of a product leaves no barrier before all that was to arrive has arrived."""
    with simulation(all_phases=True):
        yield


def case(tokens: int, rows: tuple[int, ...], size: int, *, slots: int, rank: int, filled: int | None = None):
    """Tokens of all slots and of none, and a weight; of the rank, `filled` columns are an adapter's."""
    unused = slice(rank if filled is None else filled, None)
    down = (normal(1, len(rows), slots, rank, size) / 16).at[:, :, unused].set(0)
    up = tuple(normal(2 + part, each, slots, rank).at[:, :, unused].set(0) for part, each in enumerate(rows))
    own = whose(jnp.arange(tokens, dtype=jnp.int32) % (slots + 1), slots)
    return normal(tokens, tokens, size), Adapted(normal(7, sum(rows), size) / 16, Pairs(down, up), own)


def expected(x: jax.Array, weight: Adapted, activation: Any = None) -> jax.Array:
    assert isinstance(weight.weight, jax.Array)
    both = matmul_reference.matmul(x, weight.weight, dtype=jnp.dtype(jnp.float32))
    both = both + reference.lora_matmul(x, weight.pairs, weight.own)
    if activation is not None:
        both = gated(activation, *jnp.split(both, 2, axis=1))
    return both.astype(x.dtype)


def assert_close(got: jax.Array, want: jax.Array) -> None:
    """Equal but for the last bit: the order of the sum differs, and with it what is rounded in between."""
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-6, atol=2e-2)


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "rows", "size", "room", "plan"),
    [
        (1, (128,), 128, {"slots": 4, "rank": 16}, Plan(rows=64, depth=64, slots=2)),
        (13, (256, 64, 64), 128, {"slots": 2, "rank": 64}, Plan(rows=64, depth=64, slots=3)),  # six tiles, four blocks
        (8, (128,), 64, {"slots": 4, "rank": 16, "filled": 5}, Plan(rows=64, depth=64)),  # a step, and a step of pairs
        (40, (128, 128), 256, {"slots": 16, "rank": 8}, Plan(rows=128, depth=128, slots=2)),
        (16, (128,), 256, {"slots": 4, "rank": 16}, Plan(rows=64, depth=64, splits=2, slots=2)),  # the second has all
        (16, (64, 64), 256, {"slots": 12, "rank": 16}, Plan(rows=64, depth=64, splits=2, slots=3)),  # one, and two
        (128, (128,), 512, {"slots": 32, "rank": 8}, Plan(rows=128, depth=64, splits=4, slots=2)),
        (24, (64, 128, 64), 128, {"slots": 1, "rank": 64}, Plan(rows=64, depth=64, slots=2)),
    ],
)
def test_a_product_has_what_each_token_s_own_adapter_adds(monkeypatch, tokens, rows, size, room, plan):
    x, weight = case(tokens, rows, size, **room)
    monkeypatch.setattr(matmul_gpu, "num_sms", lambda: 4)
    monkeypatch.setattr(gpu, "_plan", lambda *_: plan)
    assert gpu.supports(x, weight)
    assert_close(total(gpu.parts(x, weight))[:tokens].astype(BF16), expected(x, weight))


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("tokens", "rows", "room", "plan"),
    [
        (3, (128, 128), {"slots": 4, "rank": 16}, Plan(rows=128, depth=64, slots=2)),
        (40, (256, 256), {"slots": 3, "rank": 64}, Plan(rows=256, depth=64, slots=3)),  # the ring is no piece's length
        (16, (384,), {"slots": 8, "rank": 16, "filled": 9}, Plan(rows=128, depth=128, slots=2)),  # of one module
    ],
)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_what_adapters_add_comes_before_the_gate(monkeypatch, tokens, rows, room, plan, activation):
    x, weight = case(tokens, rows, 128, **room)
    monkeypatch.setattr(matmul_gpu, "num_sms", lambda: 2)
    monkeypatch.setattr(gpu, "_plan", lambda *_: plan)
    assert gpu.supports(x, weight, activation=activation)
    got = api.gated_matmul(x, weight, activation)[:tokens]
    assert_close(got, expected(x, weight, activation))


@pytest.mark.usefixtures("simulator")
def test_a_token_s_result_is_its_own_whatever_others_have(monkeypatch):
    """And one of the model alone has the numbers that it has without adapters."""
    x, weight = case(16, (64, 64), 128, slots=4, rank=16)
    monkeypatch.setattr(matmul_gpu, "num_sms", lambda: 4)

    def run(x: jax.Array, slots: jax.Array, pairs: Pairs) -> jax.Array:
        return total(gpu.parts(x, Adapted(weight.weight, pairs, whose(slots, 4))))

    slots = weight.own.slot
    got = run(x, slots, weight.pairs)
    alone = run(jnp.zeros_like(x).at[6].set(x[6]), jnp.zeros_like(slots).at[6].set(slots[6]), weight.pairs)
    np.testing.assert_array_equal(got[6], alone[6])
    # What overflows in the first slot is not everybody's.
    large = Pairs(weight.pairs.down.at[:, 0].set(jnp.finfo(BF16).max), weight.pairs.up)
    others = np.asarray(slots) != 1
    found = run(x, slots, large)
    assert not jnp.isfinite(found[~others].astype(jnp.float32)).all(), "the case tests nothing"
    np.testing.assert_array_equal(found[others], got[others])
    plain = total(matmul_gpu.parts(x, weight.weight))
    assert (got != plain).any(axis=1).tolist() == (slots > 0).tolist()


@pytest.mark.usefixtures("simulator")
@pytest.mark.parametrize(
    ("splits", "tokens", "parts", "slots", "rank"),
    [(1, 8, 1, 4, 16), (5, 3, 2, 7, 64), (2, 8, 3, 2, 96), (3, 9, 1, 6, 2)],
)
def test_parts_are_added_and_only_a_token_s_own_is_kept(splits, tokens, parts, slots, rank):
    sums = normal(5, splits, 16, parts, slots, rank, dtype=jnp.float32)
    slot = (jnp.arange(tokens, dtype=jnp.int32) * 3 + 1) % (slots + 1)
    got = keep_own(sums, slot, jnp.dtype(BF16))
    numbers = jnp.arange(1, slots + 1)
    mask = jnp.pad(slot, (0, 16 - tokens))[:, None] == numbers[None]
    want = jnp.where(mask[:, None, :, None], total(sums), 0).astype(BF16)
    assert_close(got, want)
    np.testing.assert_array_equal(got != 0, want != 0)


@pytest.mark.usefixtures("simulator")
def test_layers_are_a_chain_with_adapters_too(monkeypatch):
    """From tokens to the parts of a sum, with rows in eights."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, gate_up = case(3, (64, 64), 128, slots=4, rank=16)
    _, down = case(3, (64,), 64, slots=4, rank=16)
    got = gated_mlp(x, gate_up, down)
    assert got.shape[1:] == (8, 64)
    assert_close(total(got)[:3].astype(BF16), expected(expected(x, gate_up, "silu"), down))


def wanted(tokens: int = 8, rows: tuple[int, ...] = (128,), size: int = 64, slots: int = 4, rank: int = 16) -> Any:
    """Shapes."""

    def array(*shape: int, dtype: Any = BF16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    pairs = Pairs(array(len(rows), slots, rank, size), tuple(array(each, slots, rank) for each in rows))
    own = Own(array(tokens, dtype=jnp.int32), array(tokens, slots, dtype=jnp.int8))
    return array(tokens, size), Adapted(array(sum(rows), size), pairs, own)


def test_products_with_adapters_are_a_chain_s_where_kernels_do_their_shapes(monkeypatch):
    assert not api.takes(*wanted())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert api.takes(*wanted())
    assert api.takes(*wanted(rows=(64, 64)), activation="silu")
    assert api.takes(*wanted(tokens=128, rows=(64, 128, 64), slots=6, rank=32))
    assert not api.takes(*wanted(tokens=129))
    assert not api.takes(*wanted(rows=(96, 32)))  # a tile would have rows of both
    assert not api.takes(*wanted(slots=64, rank=1))
    assert not api.takes(*wanted(slots=3))  # no slot of the ring is as narrow
    assert not api.takes(*wanted(rows=(64,)), activation="silu")
    x, weight = wanted()
    assert not api.takes(jax.ShapeDtypeStruct(x.shape, jnp.float32), weight)


@pytest.mark.parametrize("tokens", [1, 64, 128])
@pytest.mark.parametrize(
    ("rows", "size", "activation"),
    [((4096, 1024, 1024), 4096, None), ((4096,), 4096, None), ((14336, 14336), 4096, "silu"), ((4096,), 14336, None)],
    ids=["qkv", "o", "gate_up", "down"],
)
def test_shapes_of_an_8b_model_are_taken_and_fill_the_chip(monkeypatch, tokens, rows, size, activation):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, weight = wanted(tokens, rows, size, slots=16, rank=16)
    assert api.takes(x, weight, activation=activation)
    plan = gpu.first_plan(tokens, weight.pairs)
    blocks = len(rows) * 16 * 16 // plan.rows * plan.splits
    assert hopper.SMS // 2 < blocks <= hopper.SMS


@pytest.mark.parametrize("room", [(4, 16), (12, 16), (16, 16), (16, 64), (1, 64), (256, 8)])
@pytest.mark.parametrize("rows", [(896, 128, 128), (3584, 512, 512), (18944, 18944), (8192, 1024, 1024), (24576,)])
def test_a_product_that_is_taken_has_a_plan_that_the_kernel_does(monkeypatch, rows, room):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    slots, rank = room
    for tokens in (1, 8, 33, 64, 100, 128):
        for activation in (None, "silu"):
            x, weight = wanted(tokens, rows, 3584, slots=slots, rank=rank)
            assert api.takes(x, weight, activation=activation)
            plan = gpu._plan(tokens, weight, activation)
            assert (sum(rows) % plan.rows, 3584 % (plan.depth * plan.splits), slots * rank % plan.depth) == (0, 0, 0)
            # Where `in` is split, and some have more steps than others, a block has one piece.
            assert plan.splits == 1 or sum(rows) // plan.rows * plan.splits <= (plan.blocks or hopper.SMS)
            assert matmul_gpu.ring_slots(tokens, plan) >= 4
