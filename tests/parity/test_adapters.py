"""Models with adapters against transformers with the same adapters merged into its weights by PEFT, in float32."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from hex_llm.loader.adapters import pack_adapter
from hex_llm.lora.adapter import open_adapter
from hex_llm.models.adapters import Room, abstract_pairs, adaptable, adapted, whose, write_slot
from hex_llm.models.registry import family
from hex_llm.parallel.mesh import TENSOR, make_mesh
from tests.parity.test_logits import NUM_TOKENS, TOKENS, load_model, logits_of
from tests.quantization.writers import KINDS, plain, write

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
SHARED = [*ATTENTION, "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"]
MODULES = {
    "biased": ALL,
    "two-kv-heads": ALL,
    "smollm3": ALL,
    "mistral-window": ALL,
    "qwen2-tied-odd-heads": ALL,
    "qwen3-biased-window": ALL,
    "gemma-untied-grouped": ALL,
    "gemma2": ALL,
    "gemma3-ropes": ALL,
    "phi3-tied": FUSED,
    "mixtral": ATTENTION,
    "llama4-biased": SHARED,
    "gpt-oss": ATTENTION,
}
RANKS = (1, 8, 64)


def adapted_logits(folder: Path, adapters: list[Path], slots: Sequence[int], *, num_devices: int = 1) -> np.ndarray:
    """Of every position of TOKENS, for tokens whose adapter is in one of the slots, and in the next, and so on; all
    adapters are on the devices."""
    model, arch, _ = load_model(folder, num_devices=num_devices)
    weights, mesh, room = family(arch).weights, make_mesh(num_devices), Room(len(adapters), max(RANKS))
    pairs = jax.tree.map(
        lambda each: jax.device_put(np.zeros(each.shape, each.dtype), each.sharding),
        abstract_pairs(weights, arch, mesh, jnp.float32, room),
    )
    whole = NamedSharding(mesh, PartitionSpec())
    for number, path in enumerate(adapters):
        read = open_adapter(path, adaptable(weights, arch), room.rank).read()
        packed = pack_adapter(weights, arch, num_devices, jnp.float32, room, read)
        pairs = _write_slot(pairs, packed, number, mesh)
    found = []
    for slot in slots:
        own = jax.device_put(whose(jnp.full(NUM_TOKENS, slot, jnp.int32), room.slots), whole)
        found.append(logits_of(adapted(model, pairs, own), arch, mesh if num_devices > 1 else None))
    return np.stack(found)


def _write_slot(pairs, packed: np.ndarray, slot: int, mesh):
    """As the runner's program does."""
    specs = jax.tree.map(lambda each: each.sharding.spec, pairs)
    write = jax.shard_map(
        write_slot,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(TENSOR), PartitionSpec()),
        out_specs=specs,
        check_vma=False,
    )
    return jax.jit(write)(pairs, packed, jnp.int32(slot))


@pytest.fixture(scope="module")
def adapters(oracle, tmp_path_factory):
    """Makes three of different ranks and of different modules, and by different ways of scaling."""

    def make(variant: str) -> tuple[Path, list[Path]]:
        folder, target, modules = oracle.make(variant), tmp_path_factory.mktemp("adapters"), MODULES[variant]
        settings = [
            {"r": RANKS[0], "lora_alpha": 3, "target_modules": modules[:2]},
            {"r": RANKS[1], "lora_alpha": 16, "target_modules": modules, "use_rslora": True},
            {"r": RANKS[2], "lora_alpha": 32, "target_modules": modules[1:], "alpha_pattern": {modules[1]: 8}},
        ]
        made = [
            oracle.adapter(folder, target / str(number), seed=number, **each) for number, each in enumerate(settings)
        ]
        return folder, made

    return make


def check(found: np.ndarray, expected: np.ndarray, alone: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= 1e-4 * np.ptp(expected)
    assert np.abs(alone - expected).max() > 1e-2 * np.ptp(expected), "the adapter changes nothing"


@pytest.mark.parametrize("variant", MODULES)
def test_logits_equal_those_of_merged_weights(oracle, adapters, variant):
    folder, made = adapters(variant)
    alone = oracle.logits(folder, TOKENS)
    for found, path in zip(adapted_logits(folder, made, (1, 2, 3)), made, strict=True):
        check(found, oracle.merged_logits(folder, path, TOKENS), alone)


@pytest.mark.parametrize("variant", ["two-kv-heads", "phi3-tied", "gemma3-ropes", "llama4-biased"])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_logits_of_several_devices_equal_those_of_merged_weights(oracle, many_devices, adapters, variant, num_devices):
    folder, made = adapters(variant)
    (found,) = many_devices.adapted_logits(folder, num_devices, made, [2])
    check(found, oracle.merged_logits(folder, made[1], TOKENS), oracle.logits(folder, TOKENS))


def test_tokens_without_an_adapter_are_the_models_own(oracle, adapters):
    folder, made = adapters("biased")
    (found,) = adapted_logits(folder, made, [0])
    np.testing.assert_array_equal(found, logits_of(*load_model(folder)))


@pytest.mark.parametrize("kind", ["awq of 32", "gptq 4 sorted", "pack-quantized 4 of rows"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_adapters_of_weights_in_few_bits(oracle, many_devices, adapters, kind, num_devices, tmp_path):
    """Against adapters merged into what the few bits stand for."""
    folder, made = adapters("two-kv-heads")
    packed = write(folder, tmp_path / "packed", KINDS[kind])
    whole = plain(packed, tmp_path / "plain", KINDS[kind])
    if num_devices == 1:
        (found,) = adapted_logits(packed, made, [2])
    else:
        (found,) = many_devices.adapted_logits(packed, num_devices, made, [2])
    check(found, oracle.merged_logits(whole, made[1], TOKENS), oracle.logits(whole, TOKENS))
