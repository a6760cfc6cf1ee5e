"""What a plan says of memory is what a start plans."""

import pytest

from hex_llm import build
from hex_llm.catalog.chips import CHIPS, GIB
from hex_llm.planning import memory
from hex_llm.planning.memory import plan_room, weight_bytes
from hex_llm.planning.model import read_model
from hex_llm.runner import xla_options

# docs/performance.md, "What fits": GiB of weights on a chip, and tokens of KV cache, by the TPU's own compiler; with
# the catalog's share of memory and length.
COMPILED = [
    ("meta-llama/Llama-3.1-8B", "v5e", 4, 0.8, 4096, 3.74, 292_640),
    ("meta-llama/Llama-3.1-8B", "v6e", 1, 0.8, 4096, 14.96, 101_088),
    ("meta-llama/Llama-3.1-70B", "v5e", 16, 0.8, 4096, 8.37, 137_280),
    ("meta-llama/Llama-3.3-70B-Instruct", "v6e", 8, 0.8, 4096, 16.43, 295_424),
    ("google/gemma-2-27b", "v5e", 8, 0.6, 4096, 6.34, 103_648),
    ("mistralai/Mixtral-8x7B-v0.1", "v5e", 8, 0.8, 4096, 10.88, 231_072),
    ("mistralai/Mixtral-8x7B-v0.1", "v5e", 16, 0.8, 4096, 5.47, 517_664),
    ("meta-llama/Llama-4-Scout-17B-16E", "v5e", 16, 0.85, 8192, 12.67, 59_328),
]


@pytest.mark.parametrize(("name", "chip", "devices", "factor", "length", "weights", "tokens"), COMPILED)
def test_memory_is_planned_as_compiled_programs_need_it(name, chip, devices, factor, length, weights, tokens):
    model = read_model(name, None, "auto")
    room = plan_room(
        model.shape,
        model.precision,
        CHIPS[chip],
        devices,
        factor=factor,
        max_model_len=length,
        max_decode_seqs=256,
    )
    assert room.weights / GIB == pytest.approx(weights, rel=0.005)
    assert room.cache_tokens == pytest.approx(tokens, rel=0.1)


@pytest.mark.parametrize(("quantization", "gib"), [("int4", 37.78), ("fp8", 67.69)])
def test_weights_in_few_bits_are_as_large_as_they_were_on_the_card(quantization, gib):
    model = read_model("meta-llama/Llama-3.1-70B", quantization, "fp8")
    assert weight_bytes(model.shape, model.precision, 1) / GIB == pytest.approx(gib, rel=0.001)


def test_no_more_is_allocated_than_all_sequences_can_use():
    model = read_model("meta-llama/Llama-3.1-70B", "int4", "fp8")
    room = plan_room(
        model.shape,
        model.precision,
        CHIPS["h200"],
        1,
        factor=0.9,
        max_model_len=4096,
        max_decode_seqs=128,
    )
    # The card's: 117.78 GiB of weights and KV cache.
    assert (room.weights + room.cache) / GIB == pytest.approx(117.78, rel=0.001)
    assert room.cache_tokens == 128 * 4096


def test_numbers_of_the_server_are_repeated_right():
    assert memory.STEP_TOKENS == build.CHUNKED_STEP_TOKENS
    assert memory.GPU_STEP_TOKENS == build.WHOLE_STEP_TOKENS
    assert float(xla_options.GPU_MEMORY) == memory.GPU_SHARE
