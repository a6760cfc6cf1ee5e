"""Scores of a device's part of the vocabulary, where that is filled up."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.layers.embedding import share, whole, without_filling
from hex_llm.parallel.mesh import make_mesh
from hex_llm.parallel.sharding import VOCABULARY

LOGITS = jnp.asarray([[-3.0, -1.0, -2.0, 0.0], [-1.0, -2.0, -3.0, 0.0]])  # the last token fills up


def on_a_device(function, logits):
    run = jax.shard_map(function, mesh=make_mesh(1), in_specs=VOCABULARY, out_specs=VOCABULARY, check_vma=False)
    return np.asarray(run(logits))


def test_what_fills_up_is_never_the_likeliest_even_where_every_real_score_is_below_zero():
    scores = on_a_device(partial(without_filling, vocab_size=3), LOGITS)
    np.testing.assert_array_equal(scores, LOGITS.at[:, 3].set(-jnp.inf))
    np.testing.assert_array_equal(on_a_device(partial(without_filling, vocab_size=4), LOGITS), LOGITS)


def test_what_is_put_together_has_no_filling_and_can_be_shared_out_again():
    joined = on_a_device(partial(whole, vocab_size=3), LOGITS)
    np.testing.assert_array_equal(joined, LOGITS[:, :3])
    np.testing.assert_array_equal(on_a_device(share, jnp.asarray(joined)), joined)
