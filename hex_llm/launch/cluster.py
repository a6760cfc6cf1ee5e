"""What a server runs on: this machine, several hosts with an agent each, or a Ray cluster."""

import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

from hex_llm.config import Config
from hex_llm.errors import ConfigError
from hex_llm.launch.addresses import Address, Place
from hex_llm.launch.agent import hello_of
from hex_llm.launch.agents import Agents
from hex_llm.launch.launcher import Launcher
from hex_llm.launch.local import LocalLauncher
from hex_llm.launch.local_devices import local_devices
from hex_llm.launch.placement import Replica, place_engines

logger = logging.getLogger(__name__)

_KEY = "HEXLLM_CLUSTER_KEY"


@dataclass(frozen=True, slots=True)
class Cluster:
    launcher: Launcher
    placement: list[Replica]
    doors: list[str]  # the addresses at which the HTTP processes listen for engines
    key: bytes  # that signs what goes between machines


def this_machine(config: Config, folder: str) -> Cluster:
    """`folder` is one that nobody else may look into."""
    doors = [f"unix:{folder}/{index}" for index in range(config.api_server_count)]
    return Cluster(LocalLauncher(folder), _placement(config, num_hosts=1), doors, b"")


def several_hosts(config: Config, where: Place) -> Cluster:
    """This host is the first of them."""
    placement = _placement(config, num_hosts=where.num_hosts)
    _check_slices(placement, where, on_tpu=local_devices(os.environ).platform == "tpu")
    _leave_slices(os.environ)
    address, key = _own_address(where.coordinator), cluster_key()
    launcher = Agents(where, hello_of(config, 0, address), key)
    first = where.coordinator.port + 1 + 2 * config.num_engines  # above those that engines may have
    doors = [f"tcp:{Address(address, first + index)}" for index in range(config.api_server_count)]
    return Cluster(launcher, placement, doors, key)


def on_ray(config: Config) -> Cluster:
    """Of Ray's nodes, --num_hosts are used."""
    try:
        # Only here: it is an extra, and takes long to import.
        from hex_llm.launch.ray_launcher import RayLauncher, connect, devices_of_cluster
    except ImportError as error:
        raise ConfigError(
            f"--worker_distributed_method=ray needs Ray, which is not installed ({error}): pip install '.[ray]' in a"
            " checkout."
        ) from None
    address = connect(config.num_engines * config.num_hosts)
    platform, available = devices_of_cluster(config.num_hosts)
    if platform == "cpu" or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        platform, available = "cpu", len(local_devices(os.environ))
    placement = place_engines(config, num_hosts=config.num_hosts, local_devices=available)
    doors = [f"tcp:{Address(address, 0)}"] * config.api_server_count
    key = os.environ.get(_KEY) or secrets.token_hex(32)
    return Cluster(RayLauncher(placement, platform), placement, doors, key.encode())


def cluster_key() -> bytes:
    """What every host was given."""
    key = os.environ.get(_KEY, "")
    if not key:
        logger.warning(
            "%s is not set: whoever can reach the ports between the hosts can take part. Give all hosts the same.", _KEY
        )
    return key.encode()


def _placement(config: Config, *, num_hosts: int) -> list[Replica]:
    """Too few devices are found out before anything is started."""
    several = config.tensor_parallel_size * config.num_engines * num_hosts > 1
    available = len(local_devices(os.environ)) if several else 1
    return place_engines(config, num_hosts=num_hosts, local_devices=available)


def _check_slices(placement: list[Replica], where: Place, *, on_tpu: bool) -> None:
    """Between slices there is an ordinary network, over which a model cannot be split; and within a slice, the chips of
    several hosts are one world, which libtpu does not divide."""
    per_slice = where.num_hosts // where.num_slices
    hosts = len(placement[0])
    if on_tpu and 1 < hosts < per_slice:
        raise ConfigError(
            f"--tensor_parallel_size={sum(seat.num_devices for seat in placement[0])} would be {hosts} of the"
            f" {per_slice} hosts of this TPU slice: a model is on one host, or on all of a slice."
        )
    for number, replica in enumerate(placement):
        if len({seat.host // per_slice for seat in replica}) > 1:
            raise ConfigError(
                f"Replica {number} would be on {len(replica)} hosts, and a slice of this TPU has {per_slice}: a model"
                " is not split over slices. Lower --tensor_parallel_size."
            )


def _leave_slices(environment: MutableMapping[str, str]) -> None:
    """Each replica is a world of its own: libtpu must not look for the other slices."""
    for name in [name for name in environment if name.startswith("MEGASCALE_")]:
        del environment[name]


def _own_address(coordinator: Address) -> str:
    try:
        found = str(socket.getaddrinfo(coordinator.host, coordinator.port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"The address of host 0, {coordinator.host}, cannot be looked up: {error.strerror}."
        ) from None
    if ipaddress.ip_address(found).is_unspecified:
        raise ConfigError(f"--coordinator_address={coordinator} is no address that other hosts could connect to.")
    if ipaddress.ip_address(found).is_loopback and found != coordinator.host and coordinator.host != "localhost":
        logger.warning(
            "%s is %s on this host, which no other host can reach; --coordinator_address may name the address itself.",
            coordinator.host,
            found,
        )
    return found
