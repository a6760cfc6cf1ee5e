"""Which devices of which hosts each replica gets."""

from dataclasses import dataclass

from hex_llm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Seat:
    """A host's part of a replica."""

    host: int
    num_devices: int
    devices: tuple[int, ...] | None  # of the host's, by number; None where it may see all of them


# The seats of a replica, in the order of its ranks.
type Replica = tuple[Seat, ...]


def place(*, tensor: int, data: int, num_hosts: int, local_devices: int) -> list[Replica]:
    """A replica is `tensor` devices, of one host or of whole hosts; there are `data` replicas. Hosts may be left over.

    Each host has `local_devices`. Raises ConfigError where they do not suffice, or cannot be divided so.
    """
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
    return [(_seat(replica // most, replica % most, tensor),) for replica in range(data)]


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


def _seat(host: int, index: int, tensor: int) -> Seat:
    return Seat(host, tensor, tuple(range(index * tensor, (index + 1) * tensor)))
