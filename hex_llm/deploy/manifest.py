"""The parts of Kubernetes manifests that all kinds of workloads share: the server's container and pod, and what finds,
watches and scales the pods.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from hex_llm.deploy.deployment import COMMAND, HEALTH_ROUTE, LIVE_ROUTE, METRICS_ROUTE, START_S, Deployment
from hex_llm.deploy.environment import SecretKey
from hex_llm.errors import ConfigError

type Manifest = dict[str, Any]

USER = 1000  # of docker/Dockerfile
PORT = "http"  # the name of the server's port
_HOME = "/home/hexllm"
_RESOURCES = {"tpu": "google.com/tpu", "cuda": "nvidia.com/gpu"}
_LEAVE_S = 5  # in which nobody is told of the pod any more, and new requests are still served
_END_S = 10  # for the processes to end after the last answer
_PROBE_S = 10

# What a copy should have of each at most, on average; with more of any, there are to be more copies.
SCALED_BY = {"hexllm:num_requests_waiting": "4", "hexllm:kv_cache_usage_perc": "800m"}


def kubernetes_name(name: str) -> str:
    """The name as Kubernetes allows it, with room for what is put behind it."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    if not plain or not plain[0].isalpha():
        raise ConfigError(f"{name!r} makes no name for Kubernetes; give --name=, of letters, digits and dashes.")
    return plain


def labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "hex-llm", "app.kubernetes.io/instance": name}


def metadata(name: str, namespace: str | None) -> Manifest:
    return {"name": name, **({"namespace": namespace} if namespace else {}), "labels": labels(name)}


def container(deployment: Deployment, secrets: Mapping[str, SecretKey], arguments: Sequence[str]) -> Manifest:
    """The server, without devices and without probes: of several hosts only the first answers HTTP."""
    return {
        "name": "hex-llm",
        "image": deployment.image,
        "command": list(COMMAND),
        "args": list(arguments),
        "env": variables(deployment, secrets),
        "ports": [{"name": PORT, "containerPort": deployment.config.port}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": f"{_HOME}/.cache"},
        ],
    }


def devices(deployment: Deployment) -> Manifest:
    """What a container gets of its machine: all accelerators."""
    resource = _RESOURCES.get(deployment.machine.platform)
    if resource is None:
        return {}
    count = {resource: str(deployment.machine.devices)}
    return {"resources": {"requests": count, "limits": count}}


def variables(deployment: Deployment, secrets: Mapping[str, SecretKey]) -> list[Manifest]:
    plain = [{"name": name, "value": value} for name, value in deployment.environment.items()]
    by_reference = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": each.secret, "key": each.key}}}
        for name, each in secrets.items()
    ]
    return plain + by_reference


def probes() -> Manifest:
    """Of the container that answers HTTP. Until it is ready for the first time, nothing but the startup probe asks."""

    def get(path: str, failures: int) -> Manifest:
        return {"httpGet": {"path": path, "port": PORT}, "periodSeconds": _PROBE_S, "failureThreshold": failures}

    return {
        "startupProbe": get(HEALTH_ROUTE, math.ceil(START_S / _PROBE_S)),
        "readinessProbe": get(HEALTH_ROUTE, 1),
        "livenessProbe": get(LIVE_ROUTE, 3),
        # A pod is told to end at the same time as others are told not to use it any more, which takes a moment.
        "lifecycle": {"preStop": {"sleep": {"seconds": _LEAVE_S}}},
    }


def pod(deployment: Deployment, server: Manifest, pod_labels: Mapping[str, str], nodes: Mapping[str, str]) -> Manifest:
    """The template of a pod, on nodes with such labels."""
    spec: Manifest = {
        "terminationGracePeriodSeconds": math.ceil(deployment.config.drain_timeout_s) + _LEAVE_S + _END_S,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER},
        "containers": [server],
        "volumes": [
            {
                "name": "shared-memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": f"{deployment.shared_memory_mb}Mi"},
            },
            {"name": "cache", "emptyDir": {}},
        ],
    }
    if nodes:
        spec["nodeSelector"] = dict(nodes)
    if deployment.service_account:
        spec["serviceAccountName"] = deployment.service_account
    return {"metadata": {"labels": dict(pod_labels)}, "spec": spec}


def nodes_with_devices(deployment: Deployment) -> dict[str, str]:
    """The labels of nodes that are machines of the deployment."""
    machine = deployment.machine
    match machine.platform:
        case "tpu":
            topology = {"cloud.google.com/gke-tpu-topology": deployment.topology or ""}
            return {"cloud.google.com/gke-tpu-accelerator": machine.gke} | topology
        case "cuda":
            return {"cloud.google.com/gke-accelerator": machine.gke}
        case "cpu":
            return {}


def service(name: str, namespace: str | None, selected: Mapping[str, str], port: int) -> Manifest:
    """Named otherwise than the workload: a LeaderWorkerSet makes a Service of its own name, for its pods alone."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(name, namespace) | {"name": f"{name}-http"},
        "spec": {"selector": dict(selected), "ports": [{"name": PORT, "port": port, "targetPort": PORT}]},
    }


def pod_monitor(name: str, namespace: str | None, selected: Mapping[str, str], key: SecretKey | None) -> Manifest:
    """For the Prometheus operator. With API keys, /metrics wants one too: `key`."""
    endpoint: Manifest = {"port": PORT, "path": METRICS_ROUTE, "interval": "15s"}
    if key:
        endpoint["authorization"] = {"type": "Bearer", "credentials": {"name": key.secret, "key": key.key}}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(name, namespace),
        "spec": {"selector": {"matchLabels": dict(selected)}, "podMetricsEndpoints": [endpoint]},
    }


def autoscaler(deployment: Deployment, target: Manifest, name: str, namespace: str | None) -> Manifest:
    """By the server's own metrics, which an adapter has to hand to Kubernetes."""
    metrics = [
        {
            "type": "Pods",
            "pods": {"metric": {"name": metric}, "target": {"type": "AverageValue", "averageValue": value}},
        }
        for metric, value in SCALED_BY.items()
    ]
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(name, namespace),
        "spec": {
            "scaleTargetRef": {"apiVersion": target["apiVersion"], "kind": target["kind"], "name": name},
            "minReplicas": deployment.min_replicas,
            "maxReplicas": deployment.max_replicas,
            "metrics": metrics,
            # A copy takes minutes to start: one that is not needed for a moment is kept.
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
        },
    }


class _Dumper(yaml.SafeDumper):
    """Without references from one place to another, which people do not expect in manifests."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def to_yaml(manifests: Sequence[Manifest]) -> str:
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120)
