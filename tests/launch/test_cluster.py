"""What a server runs on."""

import sys

import pytest

from hex_llm.config import Config
from hex_llm.errors import ConfigError
from hex_llm.launch import cluster
from hex_llm.launch.addresses import Address, Place
from hex_llm.launch.cluster import on_ray, several_hosts, this_machine
from hex_llm.launch.local_devices import LocalDevices
from tests.server.servers import free_port


def test_ray_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "hex_llm.launch.ray_launcher", raising=False)
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed .*: pip install '.\[ray\]' in a"):
        on_ray(Config(worker_distributed_method="ray"))


def test_a_replica_does_not_lie_in_two_slices(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    place = Place(rank=0, num_hosts=4, coordinator=Address("127.0.0.1", 1), num_slices=2)
    with pytest.raises(ConfigError, match="Replica 0 would be on 4 hosts, and a slice of this TPU has 2"):
        several_hosts(Config(num_hosts=4, tensor_parallel_size=8), place)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_host_0_does_not_listen_everywhere(host):
    place = Place(rank=0, num_hosts=2, coordinator=Address(host, 7090))
    with pytest.raises(ConfigError, match=r"^--coordinator_address=.*:7090 is no address that other hosts"):
        several_hosts(Config(num_hosts=2), place)


def test_more_devices_than_all_hosts_have_are_refused_at_once(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    place = Place(rank=0, num_hosts=2, coordinator=Address("127.0.0.1", 1))
    with pytest.raises(ConfigError, match="num_request_devices 8 > num_available_devices 4"):
        several_hosts(Config(num_hosts=2, tensor_parallel_size=8), place)


def test_on_tpus_a_replica_is_on_one_host_or_on_all_of_a_slice(monkeypatch):
    monkeypatch.setattr(cluster, "local_devices", lambda environ: LocalDevices("tpu", ("0", "1", "2", "3")))
    place = Place(rank=0, num_hosts=4, coordinator=Address("127.0.0.1", 1))
    with pytest.raises(ConfigError, match="--tensor_parallel_size=8 would be 2 of the 4 hosts of this TPU slice"):
        several_hosts(Config(num_hosts=4, tensor_parallel_size=8, data_parallel_size=2), place)


def test_on_one_machine_every_start_of_an_engine_has_a_socket_of_its_own_in_the_private_folder(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    here = this_machine(Config(disagg_topo="1,1", api_server_count=2), "/private")
    found = [here.launcher.pages_address(0) for _ in range(3)]
    assert all(address.startswith("unix:/private/") for address in found)
    assert len({*found, *here.doors}) == 5


def test_too_few_devices_for_engines_of_two_kinds_are_found_out_at_once(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    with pytest.raises(ConfigError, match="num_request_devices 4 > num_available_devices 2: --disagg_topo=3,1, "):
        this_machine(Config(disagg_topo="3,1"), "/private")


def test_http_processes_listen_above_the_ports_of_the_engines(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    port = free_port()
    place = Place(rank=0, num_hosts=2, coordinator=Address("127.0.0.1", port))
    found = several_hosts(Config(num_hosts=2, disagg_topo="3,1", api_server_count=2), place)
    try:
        assert found.doors == [f"tcp:127.0.0.1:{port + 9}", f"tcp:127.0.0.1:{port + 10}"]
        assert [seat.host for (seat,) in found.placement] == [0, 1, 0, 1]
    finally:
        found.launcher.close()
