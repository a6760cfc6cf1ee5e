"""Manifests checked: those that Kubernetes knows by its own schemas, as kubernetes-validate has them; of others, the
fields by hand, and their pod templates by the same schemas.
"""

from typing import Any

import kubernetes_validate

VERSIONS = ("1.30", "1.33", kubernetes_validate.latest_version())

# The fields that the definitions of these kinds have, as far as we use them; True where they are required.
# github.com/kubernetes-sigs/lws config/crd, github.com/ray-project/kuberay ray-operator/config/crd,
# github.com/prometheus-operator/prometheus-operator example/prometheus-operator-crd.
FIELDS: dict[str, dict[str, dict[str, tuple[type, bool]]]] = {
    "LeaderWorkerSet": {
        "spec": {
            "replicas": (int, False),
            "startupPolicy": (str, True),
            "leaderWorkerTemplate": (dict, True),
        },
        "spec.leaderWorkerTemplate": {
            "size": (int, False),
            "restartPolicy": (str, False),
            "leaderTemplate": (dict, False),
            "workerTemplate": (dict, True),
        },
    },
    "PodMonitor": {
        "spec": {"selector": (dict, True), "podMetricsEndpoints": (list, True)},
        "spec.podMetricsEndpoints.0": {
            "port": (str, False),
            "path": (str, False),
            "interval": (str, False),
            "authorization": (dict, False),
        },
    },
    "RayCluster": {
        "spec": {"rayVersion": (str, False), "headGroupSpec": (dict, True), "workerGroupSpecs": (list, False)},
        "spec.headGroupSpec": {"rayStartParams": (dict, False), "template": (dict, True)},
        "spec.workerGroupSpecs.0": {
            "groupName": (str, True),
            "replicas": (int, False),
            "minReplicas": (int, True),
            "maxReplicas": (int, True),
            "numOfHosts": (int, False),
            "rayStartParams": (dict, False),
            "template": (dict, True),
        },
    },
}
API_VERSIONS = {
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "RayCluster": "ray.io/v1",
}
TEMPLATES = {
    "LeaderWorkerSet": ("spec.leaderWorkerTemplate.leaderTemplate", "spec.leaderWorkerTemplate.workerTemplate"),
    "RayCluster": ("spec.headGroupSpec.template", "spec.workerGroupSpecs.0.template"),
}


def check(manifest: dict[str, Any]) -> None:
    kind = manifest["kind"]
    if kind not in FIELDS:
        _by_schema(manifest)
        return
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert manifest["apiVersion"] == API_VERSIONS[kind]
    for path, fields in FIELDS[kind].items():
        part = at(manifest, path)
        assert set(part) <= set(fields), f"{kind} {path} has no {set(part) - set(fields)}"
        assert {name for name, (_, required) in fields.items() if required} <= set(part)
        for name, value in part.items():
            assert type(value) is fields[name][0], f"{kind} {path}.{name}"
    for path in TEMPLATES.get(kind, ()):
        _by_schema(
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "a"}, "template": at(manifest, path)}
        )


def at(manifest: dict[str, Any], path: str) -> Any:
    """The part of a manifest that names and numbers with dots between lead to."""
    part: Any = manifest
    for step in path.split("."):
        part = part[int(step) if step.isdecimal() else step]
    return part


def _by_schema(manifest: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)
