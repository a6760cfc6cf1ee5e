"""Blocks of KV cache between engines on different numbers of devices."""

import pytest

from tests.checkpoints import write_llama


@pytest.mark.parametrize(
    ("kv_heads", "source", "target", "dtype"),
    [
        (4, 1, 2, "bfloat16"),
        (4, 2, 1, "float32"),
        (4, 2, 8, "bfloat16"),  # each head on two devices
        (4, 8, 2, "bfloat16"),
        (4, 3, 2, "bfloat16"),  # two heads on each of three devices, with two that fill up
        (8, 8, 3, "float32"),
        (2, 5, 3, "bfloat16"),  # each head on two devices, and one that fills up
        (1, 4, 2, "bfloat16"),  # all have the only head
    ],
)
def test_blocks_arrive_in_another_engine_as_they_were(many_devices, tmp_path, kv_heads, source, target, dtype):
    folder = write_llama(tmp_path, num_key_value_heads=kv_heads)
    assert many_devices.moved(folder, source, target, dtype=dtype) == []


@pytest.mark.parametrize(("kv_heads", "source", "target", "kv_cache_dtype"), [(4, 1, 2, "fp8"), (4, 2, 3, "int8")])
def test_so_do_blocks_in_8_bits(many_devices, tmp_path, kv_heads, source, target, kv_cache_dtype):
    folder = write_llama(tmp_path, num_key_value_heads=kv_heads)
    assert many_devices.moved(folder, source, target, kv_cache_dtype=kv_cache_dtype) == []


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_two_devices_answer_from_a_cache_in_8_bits_as_one_does(many_devices, tmp_path, kv_cache_dtype):
    folder = write_llama(tmp_path, num_key_value_heads=4)
    prompts = [[5, 6, 7] * 9, [9] * 20, [11, 3, 40]]
    one, two = (many_devices.greedy(folder, number, prompts, 6, kv_cache_dtype) for number in (1, 2))
    assert one == two
