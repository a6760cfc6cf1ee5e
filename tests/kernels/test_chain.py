"""The kernels of a layer of a small batch, one after the other, against the plain way of the same layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import chain, hopper
from hex_llm.kernels.batch import Batch
from hex_llm.kernels.matmul import api
from hex_llm.kernels.rms import Rms
from hex_llm.kernels.rope_write.api import rope_write
from hex_llm.layers.linear import linear_parts, linear_summed
from hex_llm.layers.mlp import gated_mlp
from hex_llm.layers.norm import Stream, add_rms_norm, value
from hex_llm.layers.rope import Rope, rope_tables
from hex_llm.models import decoder
from hex_llm.models.arch import Arch, Kind
from hex_llm.models.llama import Llama
from hex_llm.models.split import Split
from hex_llm.models.weights import build
from tests.kernels.numbers import normal

PAGE = 32
ARCH = Arch(
    architecture="LlamaForCausalLM",
    vocab_size=128,
    embed_size=512,
    mlp_size=128,
    kinds=(Kind(Rope(64, 10000.0)),) * 2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=256,
    rms=Rms(1e-5),
    query_scale=64**-0.5,
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
    return normal(key, *shape) * jnp.bfloat16(scale)


@pytest.fixture
def both_ways(monkeypatch):
    """Runs something the plain way, then as a chain of kernels."""

    def run(function):
        plain = function()
        monkeypatch.setattr(hopper, "SMS", 3)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        jax.clear_caches()
        return plain, function()

    return run


def assert_close(got, want, atol):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=atol)


@pytest.mark.usefixtures("simulator")
def test_a_chain_of_kernels_gives_the_logits_and_pages_of_the_plain_way(both_ways):
    lengths = [40, 1, 33]
    keys = iter(range(100))
    model = build(
        Llama, ARCH, lambda s: random(next(keys), s.shape(Split(ARCH, 1)), 0.06) + (jnp.bfloat16(1) if s.neutral else 0)
    )
    pages = (2 * len(lengths) + 1, 2, ARCH.num_kv_heads, PAGE, ARCH.head_dim)
    kv = tuple(random(next(keys), pages) for _ in range(ARCH.num_layers))
    batch = decodes(lengths)

    def run():
        hidden, after = decoder.forward(model, ARCH, kv, batch)
        return decoder.logits(model, ARCH, hidden), after

    (want, want_kv), (got, got_kv) = both_ways(run)
    assert_close(got, want, atol=0.02 * np.abs(want).max())
    for mine, theirs in zip(got_kv, want_kv, strict=True):
        assert_close(mine, theirs, atol=0.05)


@pytest.mark.usefixtures("simulator")
def test_a_layer_with_a_bias_and_norms_of_heads_and_behind_its_products_is_a_chain_as_well(both_ways):
    """All that Qwen 2, Qwen 3 and Gemma add, but without attention, which the rest of a chain does not see."""
    embed, mlp, heads, kv_heads, head_dim, rms = 384, 64, 4, 2, 64, Rms(1e-6, plus_one=True)
    batch = decodes([40, 1, 33])
    shapes = ((3, embed), ((heads + 2 * kv_heads) * head_dim, embed), (embed, heads * head_dim), (2 * mlp, embed))
    x, qkv, o, gate_up = (random(i, shape, 0.3) for i, shape in enumerate(shapes))
    down, before = random(5, (embed, mlp), 0.3), random(6, (7, 2, kv_heads, PAGE, head_dim))
    norms = [random(10 + i, (embed,), 0.3) for i in range(4)]
    head_norms = (random(20, (head_dim,), 0.3), random(21, (head_dim,), 0.3))
    bias = random(22, qkv.shape[:1])
    tables = rope_tables(Rope(head_dim, 10000.0), batch.positions)

    @jax.jit
    def layer(stream, pages):
        x, h = add_rms_norm(stream, norms[0], rms)
        parts = linear_parts(h, qkv)
        q, pages = rope_write(parts, tables, pages, batch, x.dtype, bias=bias, norms=head_norms, rms=rms)
        parts = linear_summed(q.reshape(3, -1), o)
        x, h = add_rms_norm(Stream(x, parts, norms[1]), norms[2], rms)
        return Stream(x, gated_mlp(h, gate_up, down, activation="gelu"), norms[3]), pages

    def run():
        stream, pages = layer(Stream(x), before)
        return value(stream, rms), pages

    (want, want_pages), (got, got_pages) = both_ways(run)
    assert_close(got, want, atol=0.02 * float(jnp.abs(want).max()))
    assert_close(got_pages, want_pages, atol=0.05)
    assert "dot_general" not in str(jax.make_jaxpr(layer)(Stream(x), before)), "a product goes the plain way"


def test_what_a_chain_does_not_take_keeps_its_rows(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(chain, "MAX_TOKENS", 0)
    x, weight = random(0, (3, 512)), jnp.ones(512, jnp.bfloat16)
    _, normed = api.add_norm(x, random(1, (1, 3, 512)), weight, Rms(1e-5))
    assert normed.shape == (3, 512)
