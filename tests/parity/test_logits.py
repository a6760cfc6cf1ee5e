"""Logits against transformers', in float32, at every position of a prompt and of what follows it."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.config_json import read_config
from hex_llm.loader.weights import load
from hex_llm.models.registry import family
from hex_llm.parallel.mesh import make_mesh
from tests.models.batches import empty_pages, make_batch, run
from tests.parity.oracle import VARIANTS

PAGE = 16
TOKENS = [int(t) for t in np.random.default_rng(0).integers(3, 320, 120)]
PROMPT = 100  # tokens; the others follow one by one


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(oracle, variant):
    folder = oracle.make(variant)
    expected = oracle.logits(folder, TOKENS)
    arch = read_config(folder).arch
    model = load(family(arch).weights, arch, open_checkpoint(folder), make_mesh(), jnp.float32)
    pages = list(range(8, 0, -1))  # not in order: the page table has to be followed
    batch = make_batch([(TOKENS[:PROMPT], 0, pages)], page_size=PAGE, num_tokens=112)
    first, kv = run(model, empty_pages(arch, num_pages=9, page_size=PAGE), batch, arch=arch)
    rows = [first[:PROMPT]]
    for i in range(PROMPT, len(TOKENS)):
        batch = make_batch([([TOKENS[i]], i, pages)], page_size=PAGE, num_tokens=4)
        row, kv = run(model, kv, batch, arch=arch)
        rows.append(row[:1])
    difference = np.abs(np.concatenate(rows) - expected).max()
    assert difference <= 1e-4 * np.ptp(expected)


@pytest.mark.parametrize(
    "variant", ["rope-linear", "rope-llama3-8", "rope-llama3-32-tied", "mistral-window", "qwen2-window"]
)
def test_scaled_rope_and_windows_show_in_the_logits(oracle, variant):
    """Or else the test above would pass without them."""
    folder = oracle.make(variant)
    arch = read_config(folder).arch
    plain = replace(arch, window=None, rope=replace(arch.rope, scaling=None))
    model = load(family(arch).weights, arch, open_checkpoint(folder), make_mesh(), jnp.float32)
    batch = make_batch([(TOKENS[:PROMPT], 0, list(range(1, 9)))], page_size=PAGE, num_tokens=112)
    kv = empty_pages(arch, num_pages=9, page_size=PAGE)
    found, without = (run(model, kv, batch, arch=a)[0][:PROMPT] for a in (arch, plain))
    assert np.abs(found - without).max() > 1e-2 * np.ptp(found)


def test_a_sharded_save_of_transformers_is_read(oracle):
    """The variant would test nothing if it came out as one file."""
    folder = oracle.make("several-files")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert {tensor.path.name for tensor in open_checkpoint(folder).values()} == {
        path.name for path in folder.glob("*.safetensors")
    }


def test_the_oracle_generates_what_its_logits_say(oracle):
    folder = oracle.make("grouped")
    tokens = TOKENS[:10]
    output = oracle.generate(folder, tokens, 5)
    assert output == oracle.logits(folder, tokens + output)[9:14].argmax(-1).tolist()
