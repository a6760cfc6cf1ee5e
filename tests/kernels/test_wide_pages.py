"""Pages that are wider than a model's heads, as TPUs have them, give what pages of their width give."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.paged_attention import reference
from hex_llm.kernels.paged_attention.api import attend, page_width, prepare
from hex_llm.kernels.paged_attention.pages import value
from hex_llm.kernels.rope_write.api import rope_write
from hex_llm.kernels.rope_write.reference import rope_write as plain_rope_write
from hex_llm.parallel.backend import compiling_for
from tests.kernels.test_paged_attention import random_batch

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 4, 2, 16, 8, 40


def test_heads_narrower_than_a_tile_are_written_and_attended_as_the_reference_does():
    rng = np.random.default_rng(0)
    lengths = [(1, 20), (1, 3), (1, 30)]
    batch, used = random_batch(
        rng, lengths, page_size=PAGE_SIZE, num_pages=NUM_PAGES, table_width=8, tokens=4, seqs=4,
        decode_only=True, prompts_only=False,
    )  # fmt: skip
    tokens = batch.tokens.shape[0]
    qkv = jnp.asarray(rng.standard_normal((1, tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM), np.float32))
    angles = rng.standard_normal((tokens, 1, HEAD_DIM // 2)).astype(np.float32)
    tables = jnp.cos(angles), jnp.sin(angles)
    old = jnp.asarray(rng.standard_normal((NUM_PAGES, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM), np.float32))

    q, pages = plain_rope_write(qkv, tables, old, batch, jnp.float32)
    want = reference.attend(q, pages, batch, scale=0.25)

    @jax.jit
    def run(pages):
        shape = jax.ShapeDtypeStruct((tokens, HEADS, HEAD_DIM), jnp.float32)
        prepared = prepare(batch, shape, pages, [None])
        q, pages = rope_write(qkv, tables, pages, prepared, jnp.dtype(jnp.float32), head_dim=HEAD_DIM)
        return attend(q, pages, prepared, scale=0.25), pages

    with compiling_for("tpu"), pltpu.force_tpu_interpret_mode():
        width = page_width(HEAD_DIM)
        got, written = run(jnp.pad(old, ((0, 0),) * 4 + ((0, width - HEAD_DIM),)))
    assert width == 128
    assert got.shape == want.shape
    np.testing.assert_allclose(got[:used], want[:used], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(written[1:, ..., :HEAD_DIM], value(pages)[1:])
    assert not written[..., HEAD_DIM:].any()
