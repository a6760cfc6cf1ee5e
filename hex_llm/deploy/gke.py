"""`hex-llm deploy gke`: manifests for Kubernetes, as GKE has TPU slices and GPUs.

Where a server is one host it is a Deployment; where it is several, a LeaderWorkerSet, which keeps their pods together
and tells them of each other: on TPUs by TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, else by the variables below. It has
probes for the one pod that answers HTTP, and can be scaled. (A JobSet cannot, and the pods of a job are all alike.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hex_llm.deploy.deployment import Deployment, settle
from hex_llm.deploy.environment import SecretKey, plain_variables, secret_variables
from hex_llm.deploy.manifest import (
    Manifest,
    autoscaler,
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
from hex_llm.deploy.options import Options, read
from hex_llm.errors import ConfigError
from hex_llm.flags import flag
from hex_llm.launch.addresses import DEFAULT_PORT

SUMMARY = "Print manifests for Kubernetes, with TPU slices or GPUs of GKE."
SECRET_ENV = (
    "secret-env",
    "NAME=SECRET/KEY",
    "An environment variable of the server that is a key of a Kubernetes Secret, such as HF_TOKEN=hugging-face/token;"
    " may be given several times.",
)
# What a LeaderWorkerSet puts into the environment of its pods, in the form that arguments are written with.
_RENDEZVOUS = (f"--coordinator_address=$(LWS_LEADER_ADDRESS):{DEFAULT_PORT}", "--host_rank=$(LWS_WORKER_INDEX)")
_LEADER = {"app.kubernetes.io/component": "leader"}
_WORKER = {"app.kubernetes.io/component": "worker"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions(Options):
    namespace: str | None = flag("Kubernetes", None, "The namespace. Without it, the one that kubectl is set to.")
    monitor: bool = flag("Kubernetes", True, "Print a PodMonitor, for clusters with the Prometheus operator.")


def main(argv: Sequence[str]) -> None:
    told = read(KubernetesOptions, "gke", SUMMARY, SECRET_ENV, argv)
    environment = plain_variables(told.env, "--secret_env=NAME=SECRET/KEY")
    secrets = secret_variables(told.secret, environment)
    deployment = settle(told.options, told.model, told.server, environment)
    print(to_yaml(manifests(deployment, told.options, secrets)), end="")


def manifests(deployment: Deployment, options: KubernetesOptions, secrets: Mapping[str, SecretKey]) -> list[Manifest]:
    """The workload, and what finds, watches and scales it."""
    config = deployment.config
    if config.num_hosts > 1 and config.worker_distributed_method == "ray":
        raise ConfigError("--worker_distributed_method=ray with several hosts is what `hex-llm deploy ray` is for.")
    name, namespace = kubernetes_name(deployment.name), options.namespace
    several = config.num_hosts > 1
    make = _leader_worker_set if several else _deployment
    workload = make(deployment, name, namespace, secrets)
    answering = labels(name) | (_LEADER if several else {})
    made = [workload, service(name, namespace, answering, config.port)]
    if deployment.max_replicas > deployment.min_replicas:
        made.append(autoscaler(deployment, workload, name, namespace))
    if options.monitor:
        made.append(pod_monitor(name, namespace, answering, secrets.get("HEXLLM_API_KEYS")))
    return made


def _deployment(deployment: Deployment, name: str, namespace: str | None, secrets: Mapping[str, SecretKey]) -> Manifest:
    server = container(deployment, secrets, deployment.arguments) | devices(deployment) | probes()
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(name, namespace),
        "spec": {
            **_replicas(deployment),
            "selector": {"matchLabels": labels(name)},
            # New copies need machines of their own, which there may be none of before an old one has gone.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "progressDeadlineSeconds": _progress_s(server),
            "template": pod(deployment, server, labels(name), nodes_with_devices(deployment)),
        },
    }


def _progress_s(server: Manifest) -> int:
    """As long as the startup probe has patience, and a little longer."""
    startup = server["startupProbe"]
    return startup["periodSeconds"] * startup["failureThreshold"] + 600


def _leader_worker_set(
    deployment: Deployment, name: str, namespace: str | None, secrets: Mapping[str, SecretKey]
) -> Manifest:
    tpu = deployment.machine.platform == "tpu"
    arguments = (*deployment.arguments, *(() if tpu else _RENDEZVOUS))
    host = container(deployment, secrets, arguments) | devices(deployment)
    nodes = nodes_with_devices(deployment)
    # A slice of TPUs is a pool of nodes; the pods of one group lie on one pool, and no other group's do.
    exclusive = {"leaderworkerset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(name, namespace) | ({"annotations": exclusive} if tpu else {}),
        "spec": {
            **_replicas(deployment),
            "startupPolicy": "LeaderCreated",  # the first host is not ready before the others are there
            "leaderWorkerTemplate": {
                "size": deployment.config.num_hosts,
                "restartPolicy": "RecreateGroupOnPodRestart",  # a model that lies on several hosts needs all of them
                "leaderTemplate": pod(deployment, host | probes(), labels(name) | _LEADER, nodes),
                "workerTemplate": pod(deployment, host, labels(name) | _WORKER, nodes),
            },
        },
    }


def _replicas(deployment: Deployment) -> Manifest:
    """How many copies; where that is the autoscaler's to say, nothing, so that the manifests can be applied again."""
    scaled = deployment.max_replicas > deployment.min_replicas
    return {} if scaled else {"replicas": deployment.min_replicas}
