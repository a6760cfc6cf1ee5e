import pytest

from hex_llm.errors import OutOfMemory
from hex_llm.runner.memory import GIB, Memory, Needs, Share, plan_blocks

NEEDS = Needs(weights=16 * GIB, state=GIB, temporaries=3 * GIB, block=GIB // 256)


def plan(memory=None, share=None, **changes):
    options = {"max_model_len": 4096, "block_size": 32} | changes
    return plan_blocks(memory or Memory(total=40 * GIB, used=0), NEEDS, share or Share(0.5), **options)


def test_the_kv_cache_gets_its_share_of_what_weights_state_and_temporaries_leave():
    assert plan() == 10 * 256
    assert plan(Memory(total=40 * GIB, used=4 * GIB)) == 8 * 256


def test_vllms_share_is_of_the_whole_device():
    assert plan(share=Share(0.9, of_total=0.75)) == 10 * 256


def test_the_host_keeps_some_of_its_memory():
    assert plan(Memory(total=40 * GIB, used=0, kv_limit=4 * GIB)) == 4 * 256


def test_the_host_gives_the_longest_sequence_what_it_needs_up_to_half_of_its_memory():
    assert plan(Memory(total=40 * GIB, used=0, kv_limit=GIB), max_model_len=32768) == 1025
    with pytest.raises(OutOfMemory):
        plan(Memory(total=24 * GIB, used=0, kv_limit=GIB), max_model_len=131072)


def test_a_little_more_or_less_free_memory_on_the_host_is_the_same_number_of_blocks():
    blocks = {plan(Memory(total=40 * GIB, used=0, kv_limit=GIB - free * 2**20)) for free in range(1, 32)}
    assert blocks == {248}
    assert plan(Memory(total=40 * GIB, used=0, kv_limit=GIB - 2**20), num_blocks=251) == 252


def test_a_sequence_that_gives_back_what_it_no_longer_sees_needs_no_room_for_all_of_it():
    assert plan(max_model_len=131072, least_blocks=400) == 10 * 256
    with pytest.raises(OutOfMemory, match="--max_model_len=131072 needs more"):
        plan(max_model_len=131072, least_blocks=2560)
    small = Memory(total=40 * GIB, used=0, kv_limit=GIB)
    assert plan(small, max_model_len=131072, least_blocks=400) == 401


def test_blocks_that_nothing_could_use_are_not_taken():
    assert plan(most_blocks=1000) == 1001
    assert plan(most_blocks=5000) == 10 * 256


def test_a_number_of_blocks_overrides_the_share_and_the_null_block_comes_on_top():
    assert plan(num_blocks=5000) == 5001


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_blocks": 6000}, ["--num_blocks=6000", "5119 blocks would fit"]),
        ({"max_model_len": 131072}, ["--max_model_len=131072", "81888 tokens", "--max_model_len=81888 would fit"]),
        (
            {"memory": Memory(total=18 * GIB, used=0)},
            ["20.00 GiB beside the KV cache", "18.00 GiB are free", "only a smaller one fits"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_sums(changes, words):
    with pytest.raises(OutOfMemory) as refused:
        plan(**changes)
    message = str(refused.value)
    for word in (*words, "weights", "16.00 GiB", "temporaries", "3.00 GiB", "the device has"):
        assert word in message
