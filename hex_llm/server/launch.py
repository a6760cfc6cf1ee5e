"""From settings to running processes: the port first, then the engines, then whoever answers HTTP.

With one HTTP process that is the process itself; with several it starts them and waits for them. They share the
listening socket, and each has another one, made here before all else, that engines connect to.
"""

import errno
import os
import socket
import tempfile

from hex_llm.channel import address_of, listen
from hex_llm.config import Config
from hex_llm.errors import ConfigError, PortError
from hex_llm.launch.addresses import Place, find_place
from hex_llm.launch.agent import run_agent
from hex_llm.launch.cluster import Cluster, cluster_key, on_ray, several_hosts, this_machine
from hex_llm.launch.fleet import Fleet
from hex_llm.process import CLUSTER_KEY, hold_signals
from hex_llm.server.port_owner import port_owner
from hex_llm.server.start_checks import (
    check_adapters,
    check_faults,
    check_files,
    check_keys,
    check_no_faults,
    check_open_files,
)
from hex_llm.server.supervise import supervise

BACKLOG = 2048


def serve(config: Config) -> int:
    """Serves until it is told to stop; returns the exit code."""
    os.umask(0o077)
    where = None
    if config.num_hosts > 1:
        check_no_faults(config)
    if config.num_hosts > 1 and config.worker_distributed_method == "mp":
        where = find_place(config, os.environ)
        if where.rank > 0:
            return run_agent(config, where, cluster_key())
    listener = bind(config)
    check_files(config)
    check_keys(config, listener)
    check_adapters(config)
    check_faults(config, listener)
    check_open_files(config)
    with tempfile.TemporaryDirectory(prefix="hex-llm-") as folder:
        cluster = _cluster(config, where, folder)
        hold_signals()  # until there is an event loop that takes them
        doors = [_open_door(address) for address in cluster.doors]
        environment = {CLUSTER_KEY: cluster.key.decode()} if cluster.key else {}
        fleet = Fleet(config, cluster.launcher, cluster.placement, [address_of(door) for door in doors], environment)
        try:
            if config.api_server_count > 1:
                return supervise(config, listener, doors, cluster.key, fleet)
            # Only now: what it imports would keep the engines waiting.
            from hex_llm.server.front import run_front

            return run_front(config, listener, doors[0], cluster.key, fleet=fleet)
        finally:
            for door in doors:
                door.close()
            fleet.close()


def _cluster(config: Config, where: Place | None, folder: str) -> Cluster:
    if config.worker_distributed_method == "ray":
        return on_ray(config)
    return several_hosts(config, where) if where else this_machine(config, folder)


def _open_door(address: str) -> socket.socket:
    """Where an HTTP process takes engines in."""
    try:
        return listen(address)
    except OSError as error:
        if address.startswith("tcp:"):
            raise PortError(f"Engines cannot connect at {address}: {error.strerror}.") from None
        # Its path is too long, for one.
        raise ConfigError(f"{address}: engines cannot connect there ({error}); TMPDIR names another folder.") from None


def bind(config: Config) -> socket.socket:
    """The listening socket. A port that cannot be had is found out before anything is loaded."""
    where = f"--host={config.host} --port={config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise PortError(f"{where}: the host cannot be looked up ({_reason(error)}).") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        hint = f" {port_owner(config.port)} listens there." if error.errno == errno.EADDRINUSE else ""
        raise PortError(f"{where} cannot be listened on: {_reason(error)}.{hint}") from None
    return listener


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or "it is not a name"
