from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels.window import Window
from hex_llm.loader.config_json import parse_config
from hex_llm.loader.dummy import dummy
from hex_llm.models import decoder
from hex_llm.models.llama import Llama
from hex_llm.models.registry import family
from hex_llm.parallel.mesh import make_mesh
from tests.checkpoints import llama_config
from tests.models.batches import empty_pages, make_batch, run

PAGE = 8


def tiny(dtype=jnp.float32, **changes):
    arch = parse_config(llama_config(**changes), "config.json").arch
    model = dummy(family(arch).weights, arch, make_mesh(), dtype)
    # Dummy weights are those of a newborn model, which attends to all tokens alike.
    return jax.tree.map(lambda w: w * jnp.asarray(8 if w.ndim == 2 else 1, w.dtype), model), arch


def logits_of(model, arch, *slices):
    """Of a step of its own, on pages of its own."""
    kv = empty_pages(arch, num_pages=8, page_size=PAGE)
    logits, _ = run(model, kv, make_batch(slices, page_size=PAGE, num_tokens=32), arch=arch)
    return np.asarray(logits)


def test_a_prompt_in_pieces_gives_the_logits_of_the_whole():
    model, arch = tiny()
    tokens, pages = list(range(20, 40)), [3, 1, 2]
    whole = logits_of(model, arch, (tokens, 0, pages))[:20]
    kv = empty_pages(arch, num_pages=8, page_size=PAGE)
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        batch = make_batch([(tokens[start:stop], start, pages)], page_size=PAGE, num_tokens=32)
        part, kv = run(model, kv, batch, arch=arch)
        np.testing.assert_allclose(part[: stop - start], whole[start:stop], atol=1e-4)


def test_sequences_of_one_batch_do_not_see_each_other():
    model, arch = tiny()
    one, two = list(range(5, 15)), list(range(100, 117))
    together = logits_of(model, arch, (one, 0, [5, 1]), (two, 0, [2, 7, 3]))
    np.testing.assert_allclose(together[:10], logits_of(model, arch, (one, 0, [1, 2, 3]))[:10], atol=1e-4)
    np.testing.assert_allclose(together[10:27], logits_of(model, arch, (two, 0, [1, 2, 3]))[:17], atol=1e-4)


def test_a_token_changes_the_logits_of_its_own_position_and_later_ones_only():
    model, arch = tiny()
    tokens = list(range(20, 40))
    changed = [*tokens[:9], 300, *tokens[10:]]
    before, after = (logits_of(model, arch, (t, 0, [1, 2, 3]))[:20] for t in (tokens, changed))
    assert (np.abs(before - after).max(axis=1) > 1e-5).tolist() == [False] * 9 + [True] * 11


def test_a_window_hides_older_tokens():
    model, arch = tiny(num_hidden_layers=1)
    tokens = list(range(20, 40))
    changed = [300, *tokens[1:]]
    arch = replace(arch, kinds=(replace(arch.kinds[0], window=Window(4)),))
    before, after = (logits_of(model, arch, (t, 0, [1, 2, 3]))[:20] for t in (tokens, changed))
    assert (np.abs(before - after).max(axis=1) > 1e-5).tolist() == [True] * 4 + [False] * 16


def test_a_tied_head_is_the_embedding():
    model, arch = tiny(tie_word_embeddings=True)
    assert model.head is None
    hidden = jnp.ones((2, arch.embed_size))
    untied = Llama(model.embed, model.layers, model.norm, model.embed)
    np.testing.assert_array_equal(decoder.logits(model, arch, hidden), decoder.logits(untied, arch, hidden))


def test_bfloat16_weights_give_float32_logits_near_those_of_float32():
    model, arch = tiny()
    sequence = (list(range(20, 40)), 0, [1, 2, 3])
    exact = logits_of(model, arch, sequence)[:20]
    rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model)
    kv = empty_pages(arch, num_pages=8, page_size=PAGE, dtype=jnp.bfloat16)
    batch = make_batch([sequence], page_size=PAGE, num_tokens=32)
    out, kv = run(rounded, kv, batch, arch=arch)
    assert {pages.dtype for pages in kv} == {jnp.dtype(jnp.bfloat16)}
    assert out.dtype == jnp.float32
    assert np.abs(np.asarray(out[:20]) - exact).max() <= 0.05 * np.ptp(exact)
