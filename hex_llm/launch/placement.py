"""Which devices of which hosts each engine gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hex_llm.config import Config
from hex_llm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Seat:
    """A host's part of a replica."""

    host: int
    num_devices: int
    devices: tuple[int, ...] | None  # of the host's, by number; None where it may see all of them


# The seats of a replica, in the order of its ranks.
type Replica = tuple[Seat, ...]


def place_engines(config: Config, *, num_hosts: int, local_devices: int) -> list[Replica]:
    """Those of all engines that the settings ask for, in the order of their numbers.

    Each host has `local_devices`. Raises ConfigError where they do not suffice, or cannot be divided so.
    """
    if config.topology is not None:
        return _place_workers(config, num_hosts, local_devices)
    return place(
        tensor=config.tensor_parallel_size,
        data=config.data_parallel_size,
        num_hosts=num_hosts,
        local_devices=local_devices,
    )


def place(*, tensor: int, data: int, num_hosts: int, local_devices: int) -> list[Replica]:
    """A replica is `tensor` devices, of one host or of whole hosts; there are `data` replicas. Hosts may be left
    over."""
    check_devices(tensor, data, num_hosts * local_devices)
    if tensor > local_devices:
        if tensor % local_devices:
            raise ConfigError(
                f"--tensor_parallel_size={tensor} is neither at most nor a multiple of the {local_devices} devices"
                " of a host."
            )
        return _of_whole_hosts(tensor // local_devices, data, local_devices)
    per_host = local_devices // tensor
    if data > per_host * num_hosts:
        raise ConfigError(
            f"--data_parallel_size={data} does not fit: a host of {local_devices} devices holds {per_host} replicas of"
            f" --tensor_parallel_size={tensor}, and --num_hosts is {num_hosts}."
        )
    if data == num_hosts == 1:
        return [(Seat(0, tensor, None),)]
    # Spread evenly, so that no host has more to do than it must.
    most = -(-data // num_hosts)
    return [(_seat(replica // most, replica % most * tensor, tensor),) for replica in range(data)]


def check_devices(tensor: int, data: int, available: int) -> None:
    """Raises ConfigError where there are too few devices."""
    if tensor * data > available:
        raise ConfigError(
            f"num_request_devices {tensor * data} > num_available_devices {available}:"
            f" --tensor_parallel_size={tensor}, --data_parallel_size={data}."
        )


def _of_whole_hosts(hosts: int, data: int, local_devices: int) -> list[Replica]:
    """Whoever has all of a host may see all of it."""
    return [
        tuple(Seat(replica * hosts + rank, local_devices, None) for rank in range(hosts)) for replica in range(data)
    ]


def _place_workers(config: Config, num_hosts: int, local_devices: int) -> list[Replica]:
    """Engines of two sizes, each within a host."""
    sizes = [config.of_worker(index).tensor_parallel_size for index in range(config.num_engines)]
    flags = [f"--disagg_topo={config.disagg_topo}", f"--tensor_parallel_size={config.tensor_parallel_size}"]
    if config.decode_tensor_parallel_size is not None:
        flags.append(f"--decode_tensor_parallel_size={config.decode_tensor_parallel_size}")
    if sum(sizes) > num_hosts * local_devices:
        raise ConfigError(
            f"num_request_devices {sum(sizes)} > num_available_devices {num_hosts * local_devices}: {', '.join(flags)}."
        )
    if max(sizes) > local_devices:
        flag = flags[1] if config.tensor_parallel_size == max(sizes) else flags[2]
        raise ConfigError(
            f"{flag} is more than the {local_devices} devices of a host: with --disagg_topo an engine is on one host."
        )
    # On the host that has the most left, so that none has more to do than it must; where that does not go, on the one
    # that has the least.
    placed = _fill(sizes, num_hosts, local_devices, max) or _fill(sizes, num_hosts, local_devices, min)
    if placed is None:
        raise ConfigError(
            f"{', '.join(flags)} does not fit: an engine is on one host, and each of the {num_hosts} hosts has"
            f" {local_devices} devices."
        )
    return placed


def _fill(sizes: Sequence[int], num_hosts: int, local_devices: int, choose: Callable[..., int]) -> list[Replica] | None:
    """The large ones first, one beside the other: so the small ones, where their size divides that of the large ones,
    begin at multiples of theirs, as the chips of a TPU must to be a rectangle.
    """
    left = [local_devices] * num_hosts
    seats: dict[int, Seat] = {}
    for index, size in sorted(enumerate(sizes), key=lambda each: -each[1]):
        fitting = [host for host in range(num_hosts) if left[host] >= size]
        if not fitting:
            return None
        host = choose(fitting, key=left.__getitem__)
        seats[index] = _seat(host, local_devices - left[host], size)
        left[host] -= size
    return [(seats[index],) for index in range(len(sizes))]


def _seat(host: int, first: int, size: int) -> Seat:
    return Seat(host, size, tuple(range(first, first + size)))
