"""`hex-llm deploy ray`: a RayCluster that fits, and the commands in it, run with a Ray that is none."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray

from hex_llm import cli
from hex_llm.config import Config
from hex_llm.deploy import ray_cluster, ray_nodes
from hex_llm.launch import ray_launcher
from tests.deploy.test_gke import GPUS, IMAGE, TPUS, deploy

# As KubeRay makes them: with quotes that a shell has to read.
START_HEAD = "ray start --head  --block  --num-cpus=0  --dashboard-host=0.0.0.0 "
START_WORKER = """ray start  --address=head-svc:6379  --block  --resources='{"TPU":4}' """


def groups(made: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    spec = made["RayCluster"]["spec"]
    (workers,) = spec["workerGroupSpecs"]
    return spec["headGroupSpec"], workers


def container(group: dict[str, Any]) -> dict[str, Any]:
    (one,) = group["template"]["spec"]["containers"]
    return one


def test_a_tpu_slice_is_one_replica_of_several_hosts(capsys):
    made = deploy(capsys, TPUS, target="ray")
    assert set(made) == {"RayCluster", "Service", "PodMonitor"}
    head, workers = groups(made)
    assert [workers[name] for name in ("replicas", "minReplicas", "maxReplicas", "numOfHosts")] == [1, 1, 1, 4]
    assert container(workers)["resources"]["limits"] == {"google.com/tpu": "4"}
    assert workers["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert "nodeSelector" not in head["template"]["spec"]
    assert "resources" not in container(head)
    assert head["rayStartParams"] == {"num-cpus": "0"}
    config = Config.from_args(container(head)["args"])
    assert (config.worker_distributed_method, config.num_hosts) == ("ray", 4)


def test_hosts_with_gpus_are_replicas(capsys):
    head, workers = groups(deploy(capsys, *GPUS, target="ray"))
    assert [workers[name] for name in ("replicas", "minReplicas", "maxReplicas", "numOfHosts")] == [2, 2, 2, 1]
    assert container(workers)["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container(head)["args"][-1] == "--worker_distributed_method=ray"


def test_the_server_in_the_head_is_found_and_watched(capsys):
    made = deploy(capsys, TPUS, "--namespace=serving", target="ray")
    name = made["RayCluster"]["metadata"]["name"]
    selected = {"ray.io/cluster": name, "ray.io/node-type": "head"}
    assert made["Service"]["spec"]["selector"] == selected
    assert made["PodMonitor"]["spec"]["selector"]["matchLabels"] == selected
    server = container(groups(made)[0])
    assert server["readinessProbe"]["httpGet"]["path"] == "/ping"
    assert server["livenessProbe"]["httpGet"]["path"] == "/live"
    assert {"name": "gcs-server", "containerPort": 6379} in server["ports"]


def run(one: dict[str, Any], start: str, folder: Path) -> list[str]:
    """What the command of a container runs, where every program only says how it was called."""
    for program in ("ray", "python"):
        (folder / program).write_text(f'#!/bin/sh\nprintf "{program}"; printf " <%s>" "$@"; echo\n')
        (folder / program).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "KUBERAY_GEN_RAY_START_CMD": start}
    command = [*one["command"], *one.get("args", ())]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_head_starts_ray_waits_for_the_hosts_and_becomes_the_server(capsys, tmp_path):
    head, _ = groups(deploy(capsys, TPUS, "--", "--num_hosts=4", "--served_model_name=a b", target="ray"))
    assert run(container(head), START_HEAD, tmp_path) == [
        "ray <start> <--head> <--num-cpus=0> <--dashboard-host=0.0.0.0>",
        "python <-m> <hex_llm.deploy.ray_nodes> <TPU> <4>",
        f"python <-m> <hex_llm.server.api_server> <--model={TPUS}> <--num_hosts=4> <--served_model_name=a b>"
        " <--worker_distributed_method=ray>",
    ]


def test_a_worker_is_what_kuberay_starts(capsys, tmp_path):
    _, workers = groups(deploy(capsys, TPUS, target="ray"))
    assert run(container(workers), START_WORKER, tmp_path) == [
        'ray <start> <--address=head-svc:6379> <--block> <--resources={"TPU":4}>'
    ]


def test_the_hosts_are_waited_for(monkeypatch):
    def node(alive: bool, **resources: float) -> dict[str, Any]:
        return {"Alive": alive, "Resources": resources}

    head, host, dead = node(True, memory=1.0), node(True, TPU=4.0, CPU=8.0), node(False, TPU=4.0)
    assert ray_nodes.num_nodes([head, host, dead], "TPU") == 1
    answers = iter([[head], [head, host], [head, host, dead], [head, host, host]])
    calls = []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr(ray, "init", lambda **keywords: calls.append(keywords["address"]))
    monkeypatch.setattr(ray, "nodes", lambda: next(answers))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(ray_nodes, "_POLL_S", 0)
    ray_nodes.main(["TPU", "2"])
    assert calls == ["127.0.0.1:6379", "shutdown"]
    assert next(answers, None) is None


def test_devices_are_what_the_server_will_ask_ray_for():
    assert ray_cluster._RESOURCES == ray_launcher.RESOURCES | {"cpu": "CPU"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-replicas=2"], "A Ray cluster has one server"),
        (["--env=HF_TOKEN=hf_secret"], "use --secret_env=NAME=SECRET/KEY"),
        (["--", "--max_modle_len=1"], "There is no flag --max_modle_len"),
    ],
)
def test_what_cannot_be_is_refused(argv, message, capsys):
    assert cli.main(["deploy", "ray", TPUS, IMAGE, *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, message in err, "hf_secret" in err) == ("", True, False)
