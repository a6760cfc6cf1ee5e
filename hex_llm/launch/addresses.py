"""Which of several hosts this one is, and where host 0 is: from flags, else from what a TPU's host knows of itself.

Every host runs the same command, so that what tells them apart comes from outside: `--coordinator_address` and
`--host_rank`; or what GKE and Vertex AI put into the environment (`TPU_WORKER_ID`, `TPU_WORKER_HOSTNAMES`, and for
several slices `MEGASCALE_*`); or, on a TPU VM, its metadata server.
"""

import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hex_llm.config import Config
from hex_llm.errors import ConfigError

# Of the connections between hosts, where no flag says: the ones that JAX and libtpu take begin at 8431.
DEFAULT_PORT = 7090
_METADATA_S = 2.0  # for one answer of the metadata server, which is on the machine
_METADATA_TRIES = 3


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Reads HOST:PORT; the host of an IPv6 address is in brackets."""
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%a-z]+)\]|([^\s:\[\]/]+)):(\d{1,5})", text)
        if match is None or not 0 < int(match[3]) < 2**16:
            raise ConfigError(f"--coordinator_address={text} is not HOST:PORT, such as 10.0.0.2:{DEFAULT_PORT}.")
        return cls(match[1] or match[2], int(match[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Place:
    """This host among `num_hosts`: the one of rank 0 serves, at the address that the others connect to."""

    rank: int
    num_hosts: int
    coordinator: Address
    num_slices: int = 1  # of TPU chips, each of so many hosts; a replica lies within one


@dataclass(frozen=True, slots=True)
class _Found:
    """What was found of a TPU's hosts, and where."""

    source: str
    rank: int | None
    hosts: tuple[str, ...]  # of this host's slice, in the order of their ranks
    num_slices: int = 1
    slice_index: int = 0
    first_host: str | None = None  # of all slices


def find_place(config: Config, environment: Mapping[str, str], *, devices: Path = Path("/dev")) -> Place:
    """The place of this host; ConfigError where nothing tells it, or two things tell different."""
    if config.coordinator_address is not None and config.host_rank is not None:
        return Place(config.host_rank, config.num_hosts, Address.parse(config.coordinator_address))
    found = _from_environment(environment) or _from_metadata(environment, devices)
    if found is None:
        raise ConfigError(
            f"--num_hosts={config.num_hosts} needs to know which host this is:{_missing(config)} (On a TPU's hosts,"
            " TPU_WORKER_ID and TPU_WORKER_HOSTNAMES or the metadata server say it; none of these is here.)"
        )
    num_hosts = len(found.hosts) * found.num_slices
    if num_hosts != config.num_hosts:
        slices = f" in each of {found.num_slices} slices" if found.num_slices > 1 else ""
        raise ConfigError(
            f"--num_hosts={config.num_hosts}, but {found.source} names {len(found.hosts)} hosts{slices}:"
            f" {', '.join(found.hosts)}."
        )
    rank = config.host_rank
    if rank is None:
        if found.rank is None or not 0 <= found.rank < len(found.hosts):
            raise ConfigError(
                f"{found.source} names {len(found.hosts)} hosts, and TPU_WORKER_ID, which says which of them this is,"
                f" is {'not set' if found.rank is None else found.rank}."
            )
        rank = found.slice_index * len(found.hosts) + found.rank
    if config.coordinator_address is not None:
        coordinator = Address.parse(config.coordinator_address)
    else:
        coordinator = Address(found.first_host or found.hosts[0], DEFAULT_PORT)
    return Place(rank, config.num_hosts, coordinator, found.num_slices)


def _missing(config: Config) -> str:
    texts = {
        "--coordinator_address=HOST:PORT, where host 0 is": config.coordinator_address,
        f"--host_rank, from 0 to {config.num_hosts - 1}": config.host_rank,
    }
    return f" give {' and '.join(text for text, value in texts.items() if value is None)}."


def _from_environment(environment: Mapping[str, str]) -> _Found | None:
    names = environment.get("TPU_WORKER_HOSTNAMES", "")
    if not names:
        return None
    return _with_slices(
        _Found(
            source=f"TPU_WORKER_HOSTNAMES={names}",
            rank=_number("TPU_WORKER_ID", environment.get("TPU_WORKER_ID")),
            hosts=tuple(name.strip() for name in names.split(",")),
        ),
        environment,
    )


def _with_slices(found: _Found, environment: Mapping[str, str]) -> _Found:
    """With several slices every host also knows which slice is its own, and the first host of all."""
    num_slices = _number("MEGASCALE_NUM_SLICES", environment.get("MEGASCALE_NUM_SLICES")) or 1
    if num_slices == 1:
        return found
    index = _number("MEGASCALE_SLICE_ID", environment.get("MEGASCALE_SLICE_ID"))
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS", "")
    if index is None or not 0 <= index < num_slices or not first:
        raise ConfigError(
            f"MEGASCALE_NUM_SLICES={num_slices} needs MEGASCALE_SLICE_ID below it, which is {index}, and"
            f" MEGASCALE_COORDINATOR_ADDRESS, which is {first or 'not set'}."
        )
    host = first.rsplit(":", 1)[0] if re.search(r":\d+$", first) else first
    return _Found(found.source, found.rank, found.hosts, num_slices, index, host)


def _from_metadata(environment: Mapping[str, str], devices: Path) -> _Found | None:
    """What the metadata server of a TPU VM says; it is asked only where there is a TPU."""
    has_tpu = any(devices.glob("accel[0-9]*")) or any((devices / "vfio").glob("[0-9]*"))
    if not has_tpu or environment.get("TPU_SKIP_MDS_QUERY"):
        return None
    server = environment.get("GCE_METADATA_HOST") or environment.get("GCE_METADATA_IP") or "metadata.google.internal"

    def ask(attribute: str) -> str | None:
        return _ask(f"http://{server}/computeMetadata/v1/instance/attributes/{attribute}")

    endpoints = ask("worker-network-endpoints")
    if not endpoints:
        return None
    found = _Found(
        source="worker-network-endpoints of the metadata server",
        rank=_number("agent-worker-number", ask("agent-worker-number")),
        hosts=tuple(map(_endpoint_host, endpoints.strip().split(","))),
    )
    return _with_slices(found, _tpu_env(ask("tpu-env") or "") | dict(environment))


def _endpoint_host(endpoint: str) -> str:
    """An endpoint is a name, or a name, a number and an address with colons between."""
    parts = endpoint.strip().split(":")
    return parts[2] if len(parts) == 3 else parts[0]


def _tpu_env(text: str) -> dict[str, str]:
    """Lines such as `MEGASCALE_NUM_SLICES: '2'`."""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip().strip("'") for name, value in pairs}


def _ask(url: str) -> str | None:
    """An attribute's value; None where the server does not have it."""
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    error: Exception | None = None
    for attempt in range(_METADATA_TRIES):
        time.sleep(0.5 * bool(attempt))
        try:
            with opener.open(request, timeout=_METADATA_S) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as refused:
            if refused.code == 404:
                return None
            error = refused
        except OSError as unreachable:
            error = unreachable
    raise ConfigError(
        f"The metadata server of this TPU VM does not answer at {url}: {error}. Without it, give"
        " --coordinator_address and --host_rank."
    )


def _number(name: str, text: str | None) -> int | None:
    if text is None or not text.strip():
        return None
    if not text.strip().isdecimal():
        raise ConfigError(f"{name}={text} is not a number.")
    return int(text)
