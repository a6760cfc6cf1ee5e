"""Logits against transformers', in float32, at every position: in chunks, from a shared prefix and token by token, on
one device and on three."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.layers.rope import Rope
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.config_json import read_config
from hex_llm.loader.model_checkpoint import open_model
from hex_llm.loader.weights import load
from hex_llm.models.few_bits import in_units
from hex_llm.models.registry import family
from hex_llm.parallel.mesh import make_mesh
from tests.models.batches import empty_pages, make_batch, run
from tests.parity.variants import VARIANTS

PAGE, NUM_TOKENS = 16, 56
TOKENS = [int(t) for t in np.random.default_rng(0).integers(3, 316, 108)]
SHARED = 4  # pages that a second sequence finds computed


def load_model(folder, *, num_devices=1):
    config, mesh = read_config(folder), make_mesh(num_devices)
    arch = in_units(config.arch, config.quantization, num_devices)
    checkpoint = open_model(folder, family(arch))
    model = load(family(arch).weights, arch, checkpoint, mesh, jnp.float32, quantization=config.quantization)
    return model, arch, mesh if num_devices > 1 else None


def logits_of(model, arch, mesh):
    """Of every position of TOKENS, each computed by one of two sequences that share their first pages."""
    first, second = [7, 3, 9, 1, 5, 11, 2], [7, 3, 9, 1, 12, 6, 4]  # not in order: the page table has to be followed
    num_devices = 1 if mesh is None else mesh.size
    kv, rows = empty_pages(arch, num_pages=13, page_size=PAGE, num_devices=num_devices), {}
    long = None if arch.rope_switch is None else len(TOKENS) > arch.rope_switch

    def step(*slices):
        """Each slice is (first position, end, pages)."""
        nonlocal kv
        batch = make_batch(
            [(TOKENS[start:end], start, pages) for start, end, pages in slices],
            page_size=PAGE,
            num_tokens=NUM_TOKENS,
            width=7,
            num_seqs=2,
            long=long,
        )
        out, kv = run(model, kv, batch, arch=arch, mesh=mesh)
        out, place = np.asarray(out), 0
        for start, end, _ in slices:
            rows.update(zip(range(start, end), out[place : place + end - start], strict=True))
            place += end - start

    step((0, 40, first))
    step((40, 90, first))
    step((90, 91, first), (SHARED * PAGE, 100, second))
    for i in range(8):
        step((91 + i, 92 + i, first), (100 + i, 101 + i, second))
    return np.stack([rows[i] for i in range(len(TOKENS))])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(oracle, variant):
    folder = oracle.make(variant)
    expected = oracle.logits(folder, TOKENS)
    assert np.abs(logits_of(*load_model(folder)) - expected).max() <= 1e-4 * np.ptp(expected)


# Those whose weights lie otherwise than those of `test_greedy_text`, which is on 2, 4 and 8 devices.
ON_THREE = [
    "biased",
    "two-kv-heads",
    "wide-heads",
    "qwen2-tied-odd-heads",
    "qwen3-biased-window",
    "mixtral-five-experts-one-token-each",
    "phi3-tied",
    "gemma-untied-grouped",
    "gemma3-with-vision",
    "llama4-biased",
    "gpt-oss-unbiased-tied",
]


@pytest.mark.parametrize("variant", ON_THREE)
def test_logits_of_three_devices_which_divide_nothing_equal_those_of_transformers(oracle, many_devices, variant):
    folder = oracle.make(variant)
    expected = oracle.logits(folder, TOKENS)
    assert np.abs(many_devices.logits(folder, 3) - expected).max() <= 1e-4 * np.ptp(expected)


# What is special about a variant, taken away.
WITHOUT = {
    "rope-linear": lambda kind: replace(kind, rope=replace(kind.rope, scaling=None)),
    "rope-llama3-8": lambda kind: replace(kind, rope=replace(kind.rope, scaling=None)),
    "rope-llama3-32-tied": lambda kind: replace(kind, rope=replace(kind.rope, scaling=None)),
    "rope-yarn": lambda kind: replace(kind, rope=replace(kind.rope, scaling=None)),
    "phi3-beyond-the-switch": lambda kind: replace(
        kind, rope=replace(kind.rope, scaling=replace(kind.rope.scaling, long=kind.rope.scaling.short))
    ),
    "smollm3": lambda kind: replace(kind, rope=kind.rope or Rope(8, 10000.0)),
    "smollm3-biased-window": lambda kind: replace(kind, window=None),
    "mistral-window": lambda kind: replace(kind, window=None),
    "qwen2-window": lambda kind: replace(kind, window=None),
    "gemma2": lambda kind: replace(kind, window=None),
    "gemma3-ropes": lambda kind: replace(kind, rope=replace(kind.rope, theta=10000.0)),
    "llama4": lambda kind: replace(kind, window=kind.window and replace(kind.window, chunked=False)),
    "gpt-oss": lambda kind: replace(kind, window=None),
}
CHANGED = {
    "gemma2": {"soft_cap": None},
    "gemma2-query-scale": {"query_scale": 0.25},
    "llama4": {"temperature": None},
    "llama4-llama3-rope": {"norm_rotated": False},
    "qwen3-moe-shares-as-they-are": {"renormalised": True},
    "gemma": {"embed_scale": None},
}


@pytest.mark.parametrize("variant", WITHOUT | CHANGED)
def test_what_is_special_about_a_variant_shows_in_the_logits(oracle, variant):
    """Or else the test above would pass without it."""
    model, arch, _ = load_model(oracle.make(variant))
    plain = []
    if variant in WITHOUT:
        plain.append(replace(arch, kinds=tuple(WITHOUT[variant](kind) for kind in arch.kinds)))
    if variant in CHANGED:
        plain.append(replace(arch, **CHANGED[variant]))
    batch = make_batch([(TOKENS[:100], 0, list(range(1, 8)))], page_size=PAGE, num_tokens=112, long=True)
    kv = empty_pages(arch, num_pages=9, page_size=PAGE)
    found, *without = (np.asarray(run(model, kv, batch, arch=each)[0])[:100] for each in (arch, *plain))
    for other in without:
        assert np.abs(found - other).max() > 1e-2 * np.ptp(found)


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
