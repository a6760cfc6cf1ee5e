import pytest

from hex_llm.bench.roofline import Machine, Part, Slice, served, step_parts, step_seconds, sums, weight_sizes
from hex_llm.catalog.chips import CHIPS, Chip, chip_of
from hex_llm.catalog.entry import config_of
from hex_llm.catalog.index import find
from hex_llm.loader.config_json import parse_config

V6E = Machine(CHIPS["v6e"], (2, 4))


def arch_of(name):
    entry = find(name)
    return parse_config(config_of(entry), name).arch


@pytest.fixture(scope="module")
def llama():
    return arch_of("meta-llama/Llama-3.3-70B-Instruct")


def part(name, arch, machine, slices):
    (found,) = [each for each in step_parts(arch, machine, slices) if each.name == name]
    return found


def test_a_part_takes_as_long_as_the_slowest_of_computing_reading_and_sending():
    chip = Chip("x", "X", 1, 1, bandwidth=10.0, bf16=100.0, int8=None, fp8=None, links=2, link=1.0)
    assert Part("p", flops=1000, read=10, sent=2).seconds(chip) == 10
    assert Part("p", flops=100, read=50, sent=2).seconds(chip) == 5
    assert Part("p", flops=100, read=10, sent=8).seconds(chip) == 4
    assert Part("p", sent=2, hops=1_000_000).seconds(chip) == 2


def test_the_weights_of_all_devices_are_the_models_but_for_norms_which_each_has(llama):
    entry = find("meta-llama/Llama-3.3-70B-Instruct")
    one, eight = weight_sizes(llama, 1), weight_sizes(llama, 8)
    embedding = llama.vocab_size * llama.embed_size
    assert one.dense + one.head + embedding == entry.parameters
    assert eight.head * 8 == one.head
    norms = (2 * llama.num_layers + 1) * llama.embed_size
    assert 8 * (eight.dense - norms) == one.dense - norms


def test_a_decode_step_reads_every_weight_once_and_every_key_and_value(llama):
    slices = [Slice(1, 1500)] * 64
    assert part("products", llama, V6E, slices).read == 2 * weight_sizes(llama, 8).dense
    # One head of keys and one of values for each device, of 128 numbers, in 80 layers.
    assert part("attention", llama, V6E, slices).read == 64 * 1500 * 80 * 2 * 128 * 2


def test_a_prompts_tokens_see_half_of_it_on_average(llama):
    found = part("attention", llama, V6E, [Slice(1000, 1000)])
    assert found.flops == pytest.approx(80 * 4 * 8 * 128 * 1000 * 1000 / 2, rel=0.01)


def test_windows_bound_what_is_seen_and_read():
    gemma = arch_of("google/gemma-2-27b-it")
    alone = Machine(CHIPS["v5p"], (1,))
    near, far = (part("attention", gemma, alone, [Slice(1, context)]) for context in (4096, 8192))
    # Every other layer sees the last 4096.
    assert far.flops == 1.5 * near.flops
    assert far.read == pytest.approx(1.5 * near.read, rel=0.001)


def test_a_few_tokens_read_a_few_experts_and_many_read_all():
    mixtral = arch_of("mistralai/Mixtral-8x7B-v0.1")
    experts = 2 * weight_sizes(mixtral, 8).experts
    assert part("experts", mixtral, V6E, [Slice(1, 10)]).read == experts * 2 / 8
    assert part("experts", mixtral, V6E, [Slice(1, 10)] * 64).read == pytest.approx(experts)
    assert part("experts", mixtral, V6E, [Slice(1, 10)] * 64).flops == pytest.approx(64 * experts * 2 / 8)


def test_sums_are_two_of_the_stream_in_each_layer_and_one_of_the_embedding(llama):
    found = sums(llama, V6E, tokens=64)
    assert found.sent == 161 * 2 * 7 / 8 * 64 * 8192 * 2
    assert found.hops == 161 * 8
    assert "sums" not in {each.name for each in step_parts(llama, Machine(CHIPS["v6e"], (1, 1)), [Slice(1, 1)])}


def test_what_a_load_gets_out_is_what_decodes_and_prompts_leave(llama):
    found = served(llama, V6E, running=64, prompt=1000, output=1000)
    decode = step_seconds(llama, V6E, [Slice(1, 1500)] * 64)
    assert decode < found.seconds_per_token < 2 * decode
    assert found.tokens_per_second == pytest.approx(64 / found.seconds_per_token)


def test_a_topologys_name_begins_with_its_chips():
    assert chip_of("v5e:2x4") is CHIPS["v5e"]
    assert all(chip.usable <= chip.hbm for chip in CHIPS.values())


def test_weights_in_few_bits_are_less_to_read_and_as_much_to_compute():
    arch = arch_of("mistralai/Mixtral-8x7B-Instruct-v0.1")
    machine, slices = Machine(CHIPS["v5e"], (2, 4)), [Slice(1, 100)] * 8
    wide, narrow = (step_parts(arch, machine, slices, bits=bits) for bits in (16, 4))
    assert [part.flops for part in wide] == [part.flops for part in narrow]
    shrunk = {a.name for a, b in zip(wide, narrow, strict=True) if b.read == a.read / 4 and a.read}
    assert shrunk == {"products", "experts"}
    assert step_seconds(arch, machine, slices, bits=4) < step_seconds(arch, machine, slices)
