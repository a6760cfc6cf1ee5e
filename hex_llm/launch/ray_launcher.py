"""Processes on a Ray cluster: a bundle of resources for each host's part of each replica, and an actor on it, which
runs the same process as everywhere else and takes it along when it goes.
"""

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hex_llm.errors import ConfigError, StartError
from hex_llm.launch.addresses import Address
from hex_llm.launch.local import start_engine
from hex_llm.launch.local_devices import Platform
from hex_llm.launch.placement import Replica, Seat
from hex_llm.launch.task import Task
from hex_llm.process import ENGINE_DIED

logger = logging.getLogger(__name__)

RESOURCES: dict[Platform, str] = {"tpu": "TPU", "cuda": "GPU"}
_PLACE_S = 120.0  # for the actors to be there: a worker of Ray's takes seconds to start, more on a busy machine
_POLL_S = 0.1
_HERE = "<here>:0"  # stands for the address of an actor's host, with any port that is free there
# Settings of the one who gives the command that are those of all its processes.
_SHARED = ("JAX_", "XLA_", "LIBTPU_", "HEX_LLM_", "NPROC", "PJRT_NPROC", "HF_", "STORAGE_EMULATOR_HOST")

# Ray tells nobody what it is used for, and every line of every process is shown: one that is like another is none the
# less one of its own.
_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}


@ray.remote  # which has it neither started again nor do two things at a time
class HostActor:
    """On the host of one part of a replica."""

    def find(self) -> tuple[str, str]:
        """The address of the host, and its number within a TPU slice where it has one."""
        return ray.util.get_node_ip_address(), os.environ.get("TPU_WORKER_ID", "")

    def free_ports(self, number: int) -> list[int]:
        with contextlib.ExitStack() as stack:
            address = ray.util.get_node_ip_address()
            family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
            probes = [stack.enter_context(socket.create_server((address, 0), family=family)) for _ in range(number)]
            return [probe.getsockname()[1] for probe in probes]

    def run(self, task: bytes, environment: dict[str, str]) -> int:
        """Runs the process to its end; returns its exit code."""
        os.environ |= environment
        decoded = msgspec.json.decode(task, type=Task)
        here = str(Address(ray.util.get_node_ip_address(), 0))
        (engine,) = decoded.engines
        engine = msgspec.structs.replace(engine, pages=engine.pages.replace(_HERE, here))
        decoded = msgspec.structs.replace(decoded, engines=(engine,))
        child = start_engine(decoded, environment)
        while (code := child.poll()) is None:
            time.sleep(_POLL_S)
        return code


class RayChild:
    """A process under an actor."""

    def __init__(self, actor: Any, exit_code: Any, name: str):
        self._actor = actor
        self._exit_code = exit_code  # of which Ray will know
        self._name = name
        self._told = False
        self._ended: int | None = None

    def poll(self) -> int | None:
        if self._ended is None and ray.wait([self._exit_code], timeout=0)[0]:
            try:
                self._ended = ray.get(self._exit_code)
            except RayError as error:
                if not self._told:
                    logger.error("The Ray actor of %s is lost: %s", self._name, str(error).splitlines()[0])
                self._ended = -signal.SIGKILL if self._told else ENGINE_DIED
        return self._ended

    def end(self) -> None:
        self._told = True
        ray.kill(self._actor)


class RayLauncher:
    def __init__(self, placement: Sequence[Replica], platform: Platform):
        """Waits for a place for everybody; ConfigError where the cluster has none."""
        seats = [(number, rank, seat) for number, replica in enumerate(placement) for rank, seat in enumerate(replica)]
        self._platform = platform
        self._bundles = [_bundle(seat, platform) for _, _, seat in seats]
        self._group = placement_group(self._bundles, strategy="SPREAD")
        if not self._group.wait(_PLACE_S):
            remove_placement_group(self._group)
            raise ConfigError(
                f"The Ray cluster has no room for {_counted(self._bundles)}: it has"
                f" {_plain(ray.cluster_resources())}, of which {_plain(ray.available_resources())} are free."
            )
        self._environment = {name: value for name, value in os.environ.items() if name.startswith(_SHARED)}
        self._actors: dict[int, Any] = {}  # that have no process yet, by bundle
        self._asked: dict[int, list[Any]] = {}  # where they are, and have not answered
        self._begun: set[int] = set()  # bundles that have had a process
        order = self._in_order() if any(len(replica) > 1 for replica in placement) else range(len(seats))
        self._bundle_of = {(number, rank): bundle for (number, rank, _), bundle in zip(seats, order, strict=True)}
        self._first_of_host = {seat.host: self._bundle_of[number, rank] for number, rank, seat in reversed(seats)}

    def addresses(self, host: int, number: int) -> list[str]:
        """Only the first time this waits for an actor: when one is started again, others are being served."""
        bundle = self._first_of_host[host]
        actor = self._actor(bundle)
        if bundle not in self._asked:
            self._asked[bundle] = [actor.find.remote(), actor.free_ports.remote(number)]
        asked = self._asked[bundle]
        if bundle in self._begun and len(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) < len(asked):
            raise StartError("its Ray actor is not there yet")
        del self._asked[bundle]
        try:
            (address, _), ports = _get(asked)
        except StartError:
            ray.kill(self._actors.pop(bundle))  # the next try is with another
            raise
        return [str(Address(address, port)) for port in ports]

    def pages_address(self, host: int) -> str:
        return f"tcp:{_HERE}"

    def start(self, host: int, task: Task, environment: Mapping[str, str]) -> RayChild:
        (engine,) = task.engines
        bundle = self._bundle_of[engine.replica, task.rank]
        actor = self._actor(bundle)
        del self._actors[bundle]
        self._begun.add(bundle)
        if self._platform != "cpu":
            task = msgspec.structs.replace(task, devices=None)  # the actor sees no others than its own
        exit_code = actor.run.remote(msgspec.json.encode(task), self._environment | dict(environment))
        return RayChild(actor, exit_code, f"host {task.rank} of {engine.config.engine_name(engine.replica)}")

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)
        ray.shutdown()

    def _in_order(self) -> list[int]:
        """The bundles in the order of the hosts: JAX counts the hosts of a TPU slice as the slice does."""
        found = _get([self._actor(bundle).find.remote() for bundle in range(len(self._bundles))])
        keys = [(int(worker) if worker.isdecimal() else 0, address) for address, worker in found]
        return sorted(range(len(keys)), key=lambda bundle: keys[bundle])

    def _actor(self, bundle: int) -> Any:
        if bundle not in self._actors:
            resources = dict(self._bundles[bundle])
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            self._actors[bundle] = HostActor.options(  # type: ignore[attr-defined]
                num_cpus=resources.pop("CPU"), num_gpus=resources.pop("GPU", 0), resources=resources,
                scheduling_strategy=where,
            ).remote()  # fmt: skip
        return self._actors[bundle]


def connect(num_parts: int) -> str:
    """To the cluster that RAY_ADDRESS names, or to one that is started here for so many actors. Returns the address of
    this machine in it."""
    for name, value in _RAY.items():
        os.environ.setdefault(name, value)
    try:
        if address := os.environ.get("RAY_ADDRESS"):
            ray.init(address=address, logging_level=logging.WARNING)
        else:
            cpus = max(num_parts, os.cpu_count() or 1)
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')}"
        raise StartError(f"There is no way to the Ray cluster ({where}): {error}") from None
    return ray.util.get_node_ip_address()


def devices_of_cluster(num_hosts: int) -> tuple[Platform, int]:
    """What its nodes have, and how many of it the least of those has that would be taken. CPU devices are no resource
    of Ray's: 0."""
    for platform, name in RESOURCES.items():
        counts = sorted((int(node["Resources"].get(name, 0)) for node in ray.nodes() if node["Alive"]), reverse=True)
        if counts and counts[0]:
            return platform, counts[min(num_hosts, len(counts)) - 1]
    return "cpu", 0


def _bundle(seat: Seat, platform: Platform) -> dict[str, float]:
    resource = RESOURCES.get(platform)
    return {"CPU": 1.0} | ({resource: float(seat.num_devices)} if resource else {})


def _counted(bundles: Sequence[Mapping[str, float]]) -> str:
    """Such as `3 times CPU 1, GPU 2 and 1 times CPU 1, GPU 4`."""
    return " and ".join(f"{number} times {kind}" for kind, number in Counter(map(_plain, bundles)).items())


def _get(answers: list[Any]) -> Any:
    try:
        return ray.get(answers, timeout=_PLACE_S)
    except GetTimeoutError:
        raise StartError(f"A Ray actor has not answered within {_PLACE_S:g} s.") from None
    except RayError as error:
        raise StartError(f"A Ray actor cannot be reached: {str(error).splitlines()[0]}") from None


def _plain(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {resources[name]:g}" for name in ("CPU", "GPU", "TPU") if name in resources) or "nothing"
