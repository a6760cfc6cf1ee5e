"""`hex-llm deploy ray`: a RayCluster for the KubeRay operator, in whose head the server runs.

It is not a RayService: that is for applications of Ray Serve, and the server has an HTTP front of its own. Engines are
actors on the workers, which have the devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hex_llm.config import Config
from hex_llm.deploy.deployment import COMMAND, Deployment, settle
from hex_llm.deploy.environment import SecretKey, plain_variables, secret_variables
from hex_llm.deploy.gke import SECRET_ENV, KubernetesOptions
from hex_llm.deploy.manifest import (
    Manifest,
    container,
    devices,
    kubernetes_name,
    labels,
    metadata,
    nodes_with_devices,
    pod,
    pod_monitor,
    probes,
    service,
    to_yaml,
)
from hex_llm.deploy.options import read
from hex_llm.errors import ConfigError

SUMMARY = "Print manifests for a Ray cluster on Kubernetes, by the KubeRay operator."
_ON_RAY = "--worker_distributed_method=ray"
_RESOURCES = {"tpu": "TPU", "cuda": "GPU", "cpu": "CPU"}  # as Ray counts devices
_GCS_PORT = 6379  # of the head, for the others
# KubeRay leaves its command to start Ray in a variable. On the head Ray goes to the background, and when the hosts have
# come the server takes the shell's place, so that it is told to end like anywhere else.
_FILES = "ulimit -n 65536 || true"
_START_HEAD = 'eval "${KUBERAY_GEN_RAY_START_CMD/--block/}"'
_START_WORKER = 'eval "exec $KUBERAY_GEN_RAY_START_CMD"'


def main(argv: Sequence[str]) -> None:
    told = read(KubernetesOptions, "ray", SUMMARY, SECRET_ENV, argv)
    environment = plain_variables(told.env, "--secret_env=NAME=SECRET/KEY")
    secrets = secret_variables(told.secret, environment)
    deployment = _on_ray(settle(told.options, told.model, told.server, environment))
    print(to_yaml(manifests(deployment, told.options, secrets)), end="")


def _on_ray(deployment: Deployment) -> Deployment:
    if deployment.max_replicas > 1:
        raise ConfigError("A Ray cluster has one server; for another copy, print manifests with another --name.")
    if deployment.config.worker_distributed_method == "ray":
        return deployment
    arguments = (*deployment.arguments, _ON_RAY)
    return replace(deployment, arguments=arguments, config=Config.from_args(arguments))


def manifests(deployment: Deployment, options: KubernetesOptions, secrets: Mapping[str, SecretKey]) -> list[Manifest]:
    """The cluster, and what finds and watches the server in its head."""
    name, namespace = kubernetes_name(deployment.name), options.namespace
    cluster: Manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        # The commands below take the place of those that KubeRay makes.
        "metadata": metadata(name, namespace) | {"annotations": {"ray.io/overwrite-container-cmd": "true"}},
        "spec": {
            # No engine is to be on the head, which has no devices.
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _head(deployment, name, secrets)},
            "workerGroupSpecs": [_workers(deployment, name, secrets)],
        },
    }
    answering = {"ray.io/cluster": name, "ray.io/node-type": "head"}  # labels that KubeRay gives
    made = [cluster, service(name, namespace, answering, deployment.config.port)]
    if options.monitor:
        made.append(pod_monitor(name, namespace, answering, secrets.get("HEXLLM_API_KEYS")))
    return made


def _head(deployment: Deployment, name: str, secrets: Mapping[str, SecretKey]) -> Manifest:
    wait = f"python -m hex_llm.deploy.ray_nodes {_RESOURCES[deployment.machine.platform]} {deployment.config.num_hosts}"
    script = f'{_FILES}; {_START_HEAD} && {wait} && exec {" ".join(COMMAND)} "$@"'
    server = container(deployment, secrets, deployment.arguments) | probes()
    server["command"] = ["/bin/bash", "-c", script, "hex-llm"]
    server["env"] = [*server["env"], {"name": "RAY_ADDRESS", "value": f"127.0.0.1:{_GCS_PORT}"}]
    server["ports"] = [*server["ports"], {"name": "gcs-server", "containerPort": _GCS_PORT}]
    return pod(deployment, server, labels(name), {})


def _workers(deployment: Deployment, name: str, secrets: Mapping[str, SecretKey]) -> Manifest:
    hosts = deployment.config.num_hosts
    tpu = deployment.machine.platform == "tpu"
    worker = container(deployment, secrets, ()) | devices(deployment)
    worker["command"] = ["/bin/bash", "-c", f"{_FILES}; {_START_WORKER}"]
    for unused in ("args", "ports"):
        del worker[unused]
    # KubeRay's own probes ask the dashboard's agent, which is not in the image. Where Ray ends, so does the container.
    alive = {"exec": {"command": ["true"]}}
    worker |= {"readinessProbe": alive, "livenessProbe": alive}
    slices = 1 if tpu else hosts  # the hosts of a TPU slice are one copy of a group
    return {
        "groupName": "workers",
        "replicas": slices,
        "minReplicas": slices,
        "maxReplicas": slices,
        "numOfHosts": hosts if tpu else 1,
        "rayStartParams": {},
        "template": pod(deployment, worker, labels(name), nodes_with_devices(deployment)),
    }
