"""The kernels of a layer of a small batch, one after the other, against the plain way of the same layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import chain, hopper
from hex_llm.kernels.batch import Batch
from hex_llm.kernels.matmul import api
from hex_llm.layers.rope import Rope
from hex_llm.models import decoder
from hex_llm.models.arch import Arch
from hex_llm.models.llama import Llama
from hex_llm.models.weights import build

PAGE = 32
ARCH = Arch(
    architecture="LlamaForCausalLM",
    vocab_size=128,
    embed_size=512,
    mlp_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=256,
    norm_eps=1e-5,
    rope=Rope(64, 10000.0),
    tied=False,
)


def decodes(lengths):
    """A batch of sequences that each get their last token, on pages of their own; those of length 0 are padding."""
    lengths = np.asarray(lengths, np.int32)
    table = 1 + np.arange(2 * len(lengths), dtype=np.int32).reshape(-1, 2)
    position = np.maximum(lengths - 1, 0)
    page = np.where(lengths > 0, table[np.arange(len(lengths)), position // PAGE], 0)
    numbers = (np.arange(len(lengths)) + 5, position, page, position % PAGE)
    return Batch(
        *(jnp.asarray(x, jnp.int32) for x in numbers),
        cu_q=None,
        kv_len=jnp.asarray(lengths),
        page_table=jnp.asarray(table),
        num_decode=jnp.int32((lengths > 0).sum()),
        num_seqs=jnp.int32((lengths > 0).sum()),
    )


def random(key, shape, scale=1.0):
    return jax.random.normal(jax.random.key(key), shape, jnp.bfloat16) * jnp.bfloat16(scale)


@pytest.mark.usefixtures("simulator")
def test_a_chain_of_kernels_gives_the_logits_and_pages_of_the_plain_way(monkeypatch):
    lengths = [40, 1, 33]
    keys = iter(range(100))
    model = build(
        Llama, ARCH, lambda s: random(next(keys), s.shape(ARCH), 0.06) + (0 if s.dummy is None else jnp.bfloat16(1))
    )
    pages = (2 * len(lengths) + 1, 2, ARCH.num_kv_heads, PAGE, ARCH.head_dim)
    kv = tuple(random(next(keys), pages) for _ in range(ARCH.num_layers))
    batch = decodes(lengths)

    def run():
        hidden, after = decoder.forward(model, ARCH, kv, batch)
        return decoder.logits(model, ARCH, hidden), after

    want, want_kv = run()
    monkeypatch.setattr(hopper, "SMS", 3)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    got, got_kv = run()
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())
    for mine, theirs in zip(got_kv, want_kv, strict=True):
        np.testing.assert_allclose(mine.astype(jnp.float32), theirs.astype(jnp.float32), atol=0.05)


def test_what_a_chain_does_not_take_keeps_its_rows(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(chain, "MAX_TOKENS", 0)
    x, weight = random(0, (3, 512)), jnp.ones(512, jnp.bfloat16)
    _, normed = api.add_norm(x, random(1, (1, 3, 512)), weight, 1e-5)
    assert normed.shape == (3, 512)
