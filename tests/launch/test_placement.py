"""Which devices each replica gets."""

import pytest

from hex_llm.errors import ConfigError
from hex_llm.launch.placement import Seat, place


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
