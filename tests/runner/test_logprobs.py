"""Log-probabilities are those of the model's own logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from hex_llm.runner.logprobs import token_logprobs

logprobs_jit = jax.jit(token_logprobs, static_argnums=2)


@pytest.mark.parametrize("k", [0, 1, 20])
def test_logprobs_ranks_and_alternatives_are_those_of_a_sorted_softmax(k):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, (40, 333)).astype(np.float32)
    tokens = rng.integers(0, 333, 40).astype(np.int32)
    tokens[0], tokens[1] = np.argmax(logits[0]), np.argmin(logits[1])
    found = logprobs_jit(jnp.asarray(logits), jnp.asarray(tokens), k)
    expected = log_softmax(logits.astype(np.float64), -1)
    order = np.argsort(-expected, -1)
    np.testing.assert_allclose(found.own, expected[np.arange(40), tokens], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.rank, 1 + np.argmax(order == tokens[:, None], -1))
    assert (found.rank[0], found.rank[1]) == (1, 333)
    np.testing.assert_array_equal(found.top_ids, order[:, :k])
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, order[:, :k], -1), rtol=1e-5, atol=1e-5)


def test_equal_logits_share_a_rank_and_masked_tokens_have_none_of_the_probability():
    logits = jnp.array([[1.0, 3.0, 3.0, -jnp.inf]])
    found = [logprobs_jit(logits, jnp.array([token], jnp.int32), 2) for token in range(4)]
    assert [int(each.rank[0]) for each in found] == [3, 1, 1, 4]
    assert found[3].own[0] == -jnp.inf
    np.testing.assert_array_equal(found[0].top_ids, [[1, 2]])
