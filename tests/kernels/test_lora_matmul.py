"""What adapters add to a product, against its meaning, on random numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.lora_matmul import reference
from hex_llm.kernels.lora_matmul.api import lora_matmul
from hex_llm.kernels.lora_matmul.weight import Pairs
from hex_llm.models.adapters import packed_size, whose, write_slot

SLOTS, SIZE = 5, 48


def random_pairs(rng, dtype, rows, rank):
    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), dtype)

    return Pairs(array(len(rows), SLOTS, rank, SIZE), tuple(array(each, SLOTS, rank) for each in rows))


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [(32,), (40, 8, 8), (24, 24)])
@pytest.mark.parametrize(("tokens", "rank"), [(1, 1), (3, 16), (40, 4)])
def test_each_token_gets_what_its_own_adapter_adds(dtype, tolerance, rows, tokens, rank):
    rng = np.random.default_rng(tokens)
    pairs = random_pairs(rng, dtype, rows, rank)
    x = jnp.asarray(rng.normal(size=(tokens + 2, SIZE)), dtype)  # the last two rows mean nothing
    slots = rng.integers(0, SLOTS + 1, tokens).astype(np.int32)
    own = whose(jnp.asarray(slots), SLOTS)
    found, expected = lora_matmul(x, pairs, own), reference.lora_matmul(x, pairs, own)
    assert (found.shape, found.dtype) == ((tokens, sum(rows)), jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    assert not np.asarray(found)[slots == 0].any()
    assert np.asarray(found)[slots > 0].any(axis=1).all()


def test_the_reference_is_the_product_with_the_two_matrices():
    rng = np.random.default_rng(0)
    pairs, x = random_pairs(rng, jnp.float32, (6, 4), 3), rng.normal(size=(2, SIZE)).astype(np.float32)
    found = reference.lora_matmul(jnp.asarray(x), pairs, whose(jnp.asarray([0, 4], jnp.int32), SLOTS))
    first, second = (
        np.asarray(up)[:, 3] @ (np.asarray(pairs.down)[part, 3] @ x[1]) for part, up in enumerate(pairs.up)
    )
    np.testing.assert_allclose(found, [np.zeros(10), np.concatenate([first, second])], rtol=1e-5, atol=1e-5)


def test_what_another_slot_holds_does_not_show_not_even_where_it_overflows():
    rng = np.random.default_rng(1)
    pairs, x = random_pairs(rng, jnp.float32, (8,), 2), jnp.asarray(rng.normal(size=(4, SIZE)), jnp.float32)
    own = whose(jnp.asarray([1, 0, 2, 1], jnp.int32), SLOTS)
    before = lora_matmul(x, pairs, own)
    most = float(np.finfo(np.float32).max)
    assert not jnp.isfinite(x @ jnp.full((SIZE, 2), most)).any(), "the case tests nothing"
    other = jnp.full((1, 2 * SIZE + 8 * 2), most)
    np.testing.assert_array_equal(lora_matmul(x, write_slot(pairs, other, jnp.int32(4)), own), before)


def test_an_adapter_is_written_to_its_slot_only():
    rng = np.random.default_rng(2)
    pairs = random_pairs(rng, jnp.float32, (8, 4), 2)
    new = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, SIZE), (8, 2), (4, 2)))
    packed = jnp.concatenate([each.ravel() for each in new])[None]
    assert packed.shape[1] == packed_size(pairs)
    found = jax.jit(write_slot, donate_argnums=0)(jax.tree.map(jnp.copy, pairs), packed, jnp.int32(1))
    np.testing.assert_array_equal(found.down[:, 1], new[0].reshape(2, 2, SIZE))
    for whole, each in zip(found.up, new[1:], strict=True):
        np.testing.assert_array_equal(whole[:, 1], each)
    others = np.array([0, 2, 3, 4])
    np.testing.assert_array_equal(found.down[:, others], pairs.down[:, others])
    np.testing.assert_array_equal(found.up[0][:, others], pairs.up[0][:, others])
