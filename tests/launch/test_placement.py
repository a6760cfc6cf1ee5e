"""Which devices each replica gets."""

import pytest

from hex_llm.config import Config
from hex_llm.errors import ConfigError
from hex_llm.launch.placement import Seat, place, place_engines


def test_one_replica_on_one_host_sees_all_devices_and_takes_as_many_as_it_needs():
    assert place(tensor=2, data=1, num_hosts=1, local_devices=8) == [(Seat(0, 2, None),)]


def test_replicas_of_one_host_have_devices_of_their_own():
    assert place(tensor=2, data=3, num_hosts=1, local_devices=8) == [
        (Seat(0, 2, (0, 1)),),
        (Seat(0, 2, (2, 3)),),
        (Seat(0, 2, (4, 5)),),
    ]


def test_replicas_are_spread_over_hosts():
    placed = place(tensor=1, data=4, num_hosts=2, local_devices=4)
    assert [seat for (seat,) in placed] == [Seat(0, 1, (0,)), Seat(0, 1, (1,)), Seat(1, 1, (0,)), Seat(1, 1, (1,))]


def test_a_replica_may_be_made_of_whole_hosts_and_hosts_may_be_left_over():
    assert place(tensor=8, data=1, num_hosts=3, local_devices=4) == [(Seat(0, 4, None), Seat(1, 4, None))]
    assert place(tensor=4, data=2, num_hosts=4, local_devices=2)[1] == (Seat(2, 2, None), Seat(3, 2, None))


@pytest.mark.parametrize(("tensor", "data", "hosts", "local"), [(4, 1, 1, 1), (2, 2, 1, 3), (1, 4, 1, 3), (4, 1, 3, 1)])
def test_more_devices_than_there_are_is_refused_with_both_numbers(tensor, data, hosts, local):
    with pytest.raises(ConfigError) as refused:
        place(tensor=tensor, data=data, num_hosts=hosts, local_devices=local)
    assert f"num_request_devices {tensor * data} > num_available_devices {hosts * local}:" in str(refused.value)
    assert f"--tensor_parallel_size={tensor}" in str(refused.value)


def test_a_replica_that_would_be_a_part_of_a_host_and_another_host_is_refused():
    with pytest.raises(ConfigError, match="--tensor_parallel_size=6 is neither"):
        place(tensor=6, data=1, num_hosts=2, local_devices=4)
    with pytest.raises(ConfigError, match="--data_parallel_size=3 does not fit"):
        place(tensor=3, data=3, num_hosts=2, local_devices=5)


def test_every_device_has_one_replica_at_most():
    for tensor in range(1, 9):
        for data in range(1, 9):
            for hosts in range(1, 5):
                for local in (1, 2, 4, 8):
                    try:
                        placed = place(tensor=tensor, data=data, num_hosts=hosts, local_devices=local)
                    except ConfigError:
                        continue
                    assert len(placed) == data
                    taken = [
                        (seat.host, device)
                        for replica in placed
                        for seat in replica
                        for device in (range(seat.num_devices) if seat.devices is None else seat.devices)
                    ]
                    assert len(taken) == len({*taken}) == tensor * data
                    assert all(host < hosts and device < local for host, device in taken)


def workers(topology: str, tensor: int, decode: int | None = None, *, hosts: int = 1, local: int = 8) -> list[Seat]:
    config = Config(disagg_topo=topology, tensor_parallel_size=tensor, decode_tensor_parallel_size=decode)
    placed = place_engines(config, num_hosts=hosts, local_devices=local)
    assert all(len(each) == 1 for each in placed)
    return [seat for (seat,) in placed]


def test_replicas_are_placed_by_the_settings():
    config = Config(data_parallel_size=2, tensor_parallel_size=2)
    assert place_engines(config, num_hosts=1, local_devices=8) == place(tensor=2, data=2, num_hosts=1, local_devices=8)


def test_engines_for_prompts_come_first_and_all_have_devices_of_their_own():
    assert workers("3,1", 2) == [Seat(0, 2, (0, 1)), Seat(0, 2, (2, 3)), Seat(0, 2, (4, 5)), Seat(0, 2, (6, 7))]


def test_the_larger_kind_is_placed_first_so_that_all_begin_at_multiples_of_their_size():
    assert workers("2,1", 1, 4) == [Seat(0, 1, (4,)), Seat(0, 1, (5,)), Seat(0, 4, (0, 1, 2, 3))]
    assert workers("1,3", 2, 1) == [Seat(0, 2, (0, 1)), Seat(0, 1, (2,)), Seat(0, 1, (3,)), Seat(0, 1, (4,))]


def test_engines_of_either_kind_are_spread_over_hosts():
    hosts = [(seat.host, seat.devices) for seat in workers("2,2", 1, hosts=2, local=4)]
    assert hosts == [(0, (0,)), (1, (0,)), (0, (1,)), (1, (1,))]
    assert [seat.host for seat in workers("3,1", 2, hosts=2, local=4)] == [0, 1, 0, 1]


def test_where_spreading_the_large_ones_leaves_no_room_they_are_put_together():
    assert len(workers("2,5", 3, 2, hosts=2, local=8)) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"topology": "3,1", "tensor": 2, "local": 4},
            "num_request_devices 8 > num_available_devices 4: --disagg_topo=3,1, --tensor_parallel_size=2.",
        ),
        (
            {"topology": "1,1", "tensor": 2, "decode": 4, "hosts": 2, "local": 2},
            "num_request_devices 6 > num_available_devices 4: --disagg_topo=1,1, --tensor_parallel_size=2,"
            " --decode_tensor_parallel_size=4.",
        ),
        (
            {"topology": "1,1", "tensor": 4, "hosts": 4, "local": 2},
            "--tensor_parallel_size=4 is more than the 2 devices of a host: with --disagg_topo an engine is on one"
            " host.",
        ),
        (
            {"topology": "1,1", "tensor": 1, "decode": 4, "hosts": 4, "local": 2},
            "--decode_tensor_parallel_size=4 is more than the 2 devices of a host: with --disagg_topo an engine is on"
            " one host.",
        ),
        (
            {"topology": "2,1", "tensor": 3, "hosts": 2, "local": 5},
            "--disagg_topo=2,1, --tensor_parallel_size=3 does not fit: an engine is on one host, and each of the 2"
            " hosts has 5 devices.",
        ),
    ],
)
def test_engines_of_two_kinds_that_have_no_place_are_refused_by_their_flags(arguments, message):
    with pytest.raises(ConfigError) as refused:
        workers(**arguments)
    assert str(refused.value) == message


def test_every_device_has_one_engine_at_most_and_powers_of_two_are_aligned_and_always_fit():
    for prefill in range(1, 5):
        for decode in range(1, 5):
            for tensor in (1, 2, 4, 8):
                for other in (1, 2, 4, 8):
                    for hosts in (1, 2, 3):
                        if prefill * tensor + decode * other > hosts * 8:
                            continue
                        seats = workers(f"{prefill},{decode}", tensor, other, hosts=hosts)
                        assert [seat.num_devices for seat in seats] == [tensor] * prefill + [other] * decode
                        taken = [(seat.host, device) for seat in seats for device in seat.devices or ()]
                        assert len(taken) == len({*taken}) == prefill * tensor + decode * other
                        assert all(host < hosts and device < 8 for host, device in taken)
                        assert all(seat.devices and seat.devices[0] % seat.num_devices == 0 for seat in seats)
