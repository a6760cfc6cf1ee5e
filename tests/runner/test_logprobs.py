"""Log-probabilities are those of the model's own logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from hex_llm.loader.config_json import parse_config
from hex_llm.models import decoder
from hex_llm.runner.logprobs import pack_logprobs, prompt_logprobs, token_logprobs
from tests.checkpoints import llama_config

ARCH = parse_config(llama_config(vocab_size=100), "the tests").arch
logprobs_jit = jax.jit(token_logprobs, static_argnums=2)


@pytest.mark.parametrize("vocab", [333, 20_001])
@pytest.mark.parametrize("k", [0, 1, 20])
def test_logprobs_ranks_and_alternatives_are_those_of_a_sorted_softmax(k, vocab):
    rng = np.random.default_rng(0)
    logits = rng.permuted(np.linspace(-40, 10, 40 * vocab, dtype=np.float32).reshape(vocab, 40).T, axis=1)
    tokens = rng.integers(0, vocab, 40).astype(np.int32)
    tokens[0], tokens[1] = np.argmax(logits[0]), np.argmin(logits[1])
    found = logprobs_jit(jnp.asarray(logits), jnp.asarray(tokens), k)
    expected = log_softmax(logits.astype(np.float64), -1)
    order = np.argsort(-expected, -1)
    np.testing.assert_allclose(found.own, expected[np.arange(40), tokens], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.rank, 1 + np.argmax(order == tokens[:, None], -1))
    assert (found.rank[0], found.rank[1]) == (1, vocab)
    np.testing.assert_array_equal(found.top_ids, order[:, :k])
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, order[:, :k], -1), rtol=1e-5, atol=1e-5)


def test_equal_logits_share_a_rank_and_masked_tokens_have_none_of_the_probability():
    logits = jnp.array([[1.0, 3.0, 3.0, -jnp.inf]])
    found = [logprobs_jit(logits, jnp.array([token], jnp.int32), 2) for token in range(4)]
    assert [int(each.rank[0]) for each in found] == [3, 1, 1, 4]
    assert found[3].own[0] == -jnp.inf
    np.testing.assert_array_equal(found[0].top_ids, [[1, 2]])


@pytest.mark.parametrize("vocab", [333, 20_001])
def test_of_equal_alternatives_the_first_are_told_and_none_from_outside_the_vocabulary(vocab):
    rng = np.random.default_rng(1)
    logits = rng.integers(0, 4, (30, vocab)).astype(np.float32)
    logits[10:20, 7:] = -np.inf  # fewer than are told
    logits[10:20, -1] = 9
    logits[20] = 0
    found = logprobs_jit(jnp.asarray(logits), jnp.zeros(30, jnp.int32), 20)
    np.testing.assert_array_equal(found.top_ids, np.argsort(-logits, -1, stable=True)[:, :20])


@pytest.mark.parametrize("num_wanted", [0, 1, 64, 65, 150])
def test_a_prompts_logprobs_are_those_of_its_rows_as_far_as_they_are_wanted(num_wanted):
    rng = np.random.default_rng(2)
    hidden = jnp.asarray(rng.normal(0, 1, (150, 16)), jnp.float32)
    table = jnp.asarray(rng.normal(0, 1, (16, 100)), jnp.float32)
    targets = rng.integers(0, 100, 151).astype(np.int32)
    targets[-1] = num_wanted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "logits", lambda params, arch, hidden: hidden @ params)
        found = jax.jit(lambda *given: prompt_logprobs(*given, arch=ARCH))(table, hidden, jnp.asarray(targets))
    expected = pack_logprobs(hidden @ table, jnp.asarray(targets[:-1]))[:num_wanted]
    np.testing.assert_array_equal(found[:num_wanted, 1:22], expected[:, 1:22])  # ranks and ids
    own = np.asarray(found[:num_wanted, 0]).view(np.float32)
    np.testing.assert_allclose(own, np.asarray(expected[:, 0]).view(np.float32), atol=1e-5)
