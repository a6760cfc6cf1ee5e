"""Settings of a server whose engines are of two kinds."""

import msgspec
import pytest

from hex_llm import LLM
from hex_llm.config import Config
from hex_llm.errors import ConfigError
from hex_llm.topology import Topology


def refusal(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_args(line.split(" | "))
    return str(caught.value)


@pytest.mark.parametrize("text", ["3,1", " 3 , 1", "3, 1 ", "03,1"])
def test_two_counts_are_read_however_they_are_spaced_and_written_in_one_way(text):
    config = Config.from_args([f"--disagg_topo={text}"])
    assert config.topology == Topology(prefill=3, decode=1)
    assert config == Config(disagg_topo="3,1")


@pytest.mark.parametrize("text", ["", "3", "3,", ",1", "3,1,1", "3;1", "-3,1", "3.0,1", "three,one", "³,1", "9" * 5000])
def test_what_is_not_two_counts_is_refused_with_the_value(text):
    expected = f"--disagg_topo={text} is not two counts with a comma between, such as 3,1."
    assert refusal(f"--disagg_topo={text}") == expected


@pytest.mark.parametrize("text", ["0,1", "1,0", "0, 0"])
def test_there_is_an_engine_of_either_kind(text):
    assert refusal(f"--disagg_topo={text}") == (
        f"--disagg_topo={text}: there must be at least 1 engine of either kind."
    )


def test_engines_are_numbered_prompts_first_and_named_by_their_kind():
    config = Config(disagg_topo="2,3")
    assert config.num_engines == 5
    assert [config.role(index) for index in range(5)] == ["prefill", "prefill", "decode", "decode", "decode"]
    assert [config.engine_name(index) for index in range(5)] == [
        "prefill 0", "prefill 1", "decode 0", "decode 1", "decode 2"
    ]  # fmt: skip


def test_engines_that_all_do_all_are_replicas():
    config = Config(data_parallel_size=2)
    assert config.topology is None
    assert config.num_engines == 2
    assert [config.role(index) for index in range(2)] == ["", ""]
    assert [config.engine_name(index) for index in range(2)] == ["replica 0", "replica 1"]
    assert config.of_worker(1) == config


@pytest.mark.parametrize(("decode", "sizes"), [(None, [2, 2, 2]), (4, [2, 2, 4]), (1, [2, 2, 1])])
def test_an_engine_has_the_devices_of_its_kind(decode, sizes):
    config = Config(disagg_topo="2,1", tensor_parallel_size=2, decode_tensor_parallel_size=decode)
    workers = [config.of_worker(index) for index in range(3)]
    assert [each.tensor_parallel_size for each in workers] == sizes
    assert [each.of_worker(index) for index, each in enumerate(workers)] == workers
    assert workers[2].engine_name(2) == "decode 0"


def test_prompts_go_in_chunks_and_prefixes_are_kept_in_every_engine():
    config = Config.from_args(["--disagg_topo=1,1"])
    assert config.enable_chunked_prefill
    assert config.enable_prefix_cache_hbm
    assert config.prefill_seqs == 16
    given = ["--disagg_topo=1,1", "--enable_chunked_prefill", "--enable_prefix_cache_hbm"]
    assert Config.from_args(given) == config


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--disagg_topo=3,1 | --data_parallel_size=2",
            "--data_parallel_size=2 and --disagg_topo=3,1 both say how many engines there are; give one.",
        ),
        ("--decode_tensor_parallel_size=2", "--decode_tensor_parallel_size=2 is for --disagg_topo."),
        ("--kv_transfer_path=host", "--kv_transfer_path=host is for --disagg_topo."),
        (
            "--disagg_topo=1,1 | --kv_transfer_path=device | --num_hosts=2",
            "--kv_transfer_path=device and --num_hosts=2 do not go together: all engines are in one process then,"
            " which has the devices of one host.",
        ),
        (
            "--disagg_topo=1,1 | --kv_transfer_path=device | --worker_distributed_method=ray",
            "--kv_transfer_path=device and --worker_distributed_method=ray do not go together: all engines are in one"
            " process then, which has the devices of one host.",
        ),
        (
            "--disagg_topo=1,1 | --kv_transfer_path=jax | --decode_tensor_parallel_size=2",
            "--kv_transfer_path=jax is for engines of as many devices, not for --tensor_parallel_size=1 and"
            " --decode_tensor_parallel_size=2.",
        ),
        (
            "--disagg_topo=1,1 | --no-enable_chunked_prefill",
            "--no-enable_chunked_prefill and --disagg_topo=1,1 do not go together; give one.",
        ),
        (
            "--no-enable-prefix-caching | --disagg_topo=1,1",
            "--no-enable_prefix_cache_hbm and --disagg_topo=1,1 do not go together; give one.",
        ),
        (
            "--disagg_topo=1,1 | --prefill_len_padding=100",
            "--prefill_len_padding=100 must be a multiple of --block_size=32 with --disagg_topo: prefixes are found in"
            " whole blocks and reported in whole paddings.",
        ),
        (
            "--disagg_topo=1,1 | --max_num_batched_tokens=64 | --max_decode_seqs=8",
            "--max_num_batched_tokens=64 is less than 128, the smallest step for prompts with --disagg_topo.",
        ),
    ],
)
def test_what_does_not_go_with_two_kinds_of_engines_is_refused(line, message):
    assert refusal(line) == message


@pytest.mark.parametrize(
    "line",
    [
        "--disagg_topo=3,1 | --data_parallel_size=1 | --kv_transfer_path=jax",
        "--disagg_topo=3,1 | --kv_transfer_path=jax | --tensor_parallel_size=2 | --decode_tensor_parallel_size=2",
        "--disagg_topo=1,2 | --num_hosts=2 | --api_server_count=2",
        "--disagg_topo=1,2 | --kv_transfer_path=device | --tensor_parallel_size=2 | --decode_tensor_parallel_size=1",
        "--disagg_topo=1,1 | --worker_distributed_method=ray",
        "--no-enable_chunked_prefill | --no-enable_prefix_cache_hbm | --kv_transfer_path=auto",
    ],
)
def test_what_goes_together_is_accepted(line):
    Config.from_args(line.split(" | "))


def test_settings_come_back_from_the_wire_as_they_were():
    config = Config(disagg_topo="3, 1", tensor_parallel_size=2, decode_tensor_parallel_size=4, kv_transfer_path="host")
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


def test_without_a_server_there_is_one_engine():
    with pytest.raises(ConfigError) as refused:
        LLM(disagg_topo="1,1")
    assert str(refused.value) == "--disagg_topo=1,1 is for a server; without one there is one engine."


@pytest.mark.parametrize("flag", ["--disagg_topo=1,1", "--data_parallel_size=2"])
def test_a_measurement_of_one_engine_is_not_of_several(flag):
    from hex_llm.bench.offline import main

    with pytest.raises(ConfigError, match=f"{flag} is for a server"):
        main([flag])
