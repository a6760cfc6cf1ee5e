"""Several hosts as one JAX world: each has its own devices, and all run the same programs in the same order."""

import os
from types import SimpleNamespace

import jax
import numpy as np
from jax import Array
from jax._src import compiler, distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh

# JAX ends a process, in its own words, when it has missed others for so long. Whoever leads or follows notices sooner.
_HEARTBEAT_S = 100
_NO_PROXY = "no_grpc_proxy"


def join_hosts(coordinator: str, *, num_hosts: int, rank: int, timeout: float) -> None:
    """Waits until all hosts are there; from then on `jax.devices()` are those of all. Before JAX looks for devices."""
    host, _, _ = coordinator.rpartition(":")
    # gRPC would look for the other hosts behind a proxy that is meant for the world outside.
    os.environ[_NO_PROXY] = ",".join(filter(None, (os.environ.get(_NO_PROXY), host.strip("[]"))))
    jax.config.update("jax_check_proxy_envs", False)
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    jax.distributed.initialize(
        coordinator,
        num_hosts,
        rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=coordinator,  # its default is every address of the machine
        initialization_timeout=round(timeout),
        heartbeat_timeout_seconds=_HEARTBEAT_S,
    )
    _keep_what_is_compiled()


def _keep_what_is_compiled() -> None:
    """JAX has only the first process of a world write to the compilation cache, as if all shared one. Each host has its
    own folder, and programs of its own: without this, a host that follows would compile everything at every start."""
    state = distributed.global_state
    seen = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=state.client))
    compiler.distributed = seen  # pyright: ignore[reportPrivateImportUsage]


def least_of_hosts(number: int) -> int:
    """The least of what the hosts call this with. Every host of the world has to call it."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).min())


def ranks_of_devices(mesh: Mesh) -> list[int]:
    """Of each device the rank of its host. Every host of the world has to call it: the number that JAX gives a process
    need not be its rank, for on a TPU it is the place of the host."""
    if jax.process_count() == 1:
        return [0] * mesh.size
    ranks = multihost_utils.process_allgather(np.int32(distributed.global_state.process_id))
    return [int(ranks[device.process_index]) for device in mesh.devices.flat]


def put_rows(rows: np.ndarray, wanted: jax.ShapeDtypeStruct, mesh: Mesh) -> Array:
    """An array that has a row for each device of a mesh, of which every host gives those of its own devices."""
    if jax.process_count() == 1:
        return jax.device_put(rows, wanted.sharding)
    assert wanted.sharding is not None, "devices of several hosts, and nothing is split among them"
    own = jax.device_put(np.split(rows, len(rows)), mesh.local_devices)
    return jax.make_array_from_single_device_arrays(wanted.shape, wanted.sharding, own)
