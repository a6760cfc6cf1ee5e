"""`hex-llm deploy gke`: manifests that fit the schemas, and say what the server needs."""

from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hex_llm import cli
from hex_llm.catalog.index import ENTRIES
from hex_llm.config import Config
from hex_llm.deploy.manifest import SCALED_BY
from hex_llm.engine.output import Stats
from hex_llm.launch.addresses import find_place
from hex_llm.server.metrics import Metrics
from tests.deploy.kubernetes import check

IMAGE = "--image=example/hex-llm:1"
TPU, TPUS, GPU = "google/gemma-2-9b-it", "meta-llama/Llama-3.1-70B", "mistralai/Mixtral-8x22B-Instruct-v0.1"
GPUS = [GPU, "--machine-type=a3-ultragpu-8g", "--", "--tensor_parallel_size=16", "--num_hosts=2"]


def deploy(capsys, *argv: str, target: str = "gke") -> dict[str, dict[str, Any]]:
    """The manifests by their kinds."""
    assert cli.main(["deploy", target, IMAGE, *argv]) == 0, capsys.readouterr().err
    manifests = list(yaml.safe_load_all(capsys.readouterr().out))
    for manifest in manifests:
        check(manifest)
    return {manifest["kind"]: manifest for manifest in manifests}


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container


# A model of each kind of machine, and number of hosts, that there is in the catalog.
OF_EACH_KIND = {
    (each.machine, each.flags.get("num_hosts", 1)): entry for entry in ENTRIES for each in entry.recommended[:1]
}


@pytest.mark.parametrize("entry", OF_EACH_KIND.values(), ids=lambda entry: entry.name)
def test_every_machine_of_the_catalog_has_manifests_that_fit_the_schemas(entry, capsys):
    made = deploy(capsys, entry.name, "--max-replicas=2")
    several = entry.recommended[0].flags.get("num_hosts", 1) > 1
    workload = "LeaderWorkerSet" if several else "Deployment"
    assert set(made) == {workload, "Service", "HorizontalPodAutoscaler", "PodMonitor"}


def test_the_schemas_find_what_is_wrong(capsys):
    made = deploy(capsys, TPU)
    container_of(made["Deployment"])["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="prots"):
        check(made["Deployment"])
    made["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["paht"] = "/"
    with pytest.raises(AssertionError, match="paht"):
        check(made["PodMonitor"])


def test_a_tpu_of_one_host_is_a_deployment(capsys):
    workload = deploy(capsys, TPU)["Deployment"]
    spec = workload["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "2x2",
    }
    container = container_of(workload)
    assert container["command"] == ["python", "-m", "hex_llm.server.api_server"]
    assert container["args"][:3] == ["--host=0.0.0.0", "--port=7080", f"--model={TPU}"]
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"google.com/tpu": "4"}
    assert spec["securityContext"]["runAsNonRoot"] is True
    memory = {"medium": "Memory", "sizeLimit": "16384Mi"}
    assert {"name": "shared-memory", "emptyDir": memory} in spec["volumes"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert workload["spec"]["replicas"] == 1


def test_gpus_are_asked_for(capsys):
    workload = deploy(capsys, GPU)["Deployment"]
    assert container_of(workload)["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    selector = workload["spec"]["template"]["spec"]["nodeSelector"]
    assert selector == {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"}


def test_the_cpu_needs_no_device(capsys):
    workload = deploy(capsys, "a/b", "--machine-type=n2-standard-16")["Deployment"]
    assert "resources" not in container_of(workload)
    assert "nodeSelector" not in workload["spec"]["template"]["spec"]


def test_probes_ask_the_servers_routes_and_wait_for_its_start_and_its_end(capsys):
    workload = deploy(capsys, TPU, "--", "--tensor_parallel_size=4", "--port=8000", "--drain_timeout_s=90.5")[
        "Deployment"
    ]
    container = container_of(workload)
    assert container["ports"] == [{"name": "http", "containerPort": 8000}]
    paths = {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {get["port"] for get in paths.values()} == {"http"}
    assert [get["path"] for get in paths.values()] == ["/ping", "/ping", "/live"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 7200
    assert workload["spec"]["progressDeadlineSeconds"] > 7200
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 91 + pause + 10


def test_what_finds_the_pods_finds_them(capsys):
    made = deploy(capsys, TPU, "--max-replicas=3", "--namespace=serving", "--name=Gemma 2")
    pod = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert made["Deployment"]["spec"]["selector"]["matchLabels"].items() <= pod.items()
    assert made["Service"]["spec"]["selector"].items() <= pod.items()
    assert made["PodMonitor"]["spec"]["selector"]["matchLabels"].items() <= pod.items()
    target = made["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "gemma-2"}
    assert {each["metadata"]["namespace"] for each in made.values()} == {"serving"}
    assert made["Service"]["spec"]["ports"][0]["targetPort"] == container_of(made["Deployment"])["ports"][0]["name"]
    assert made["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["path"] == "/metrics"


def test_the_autoscaler_goes_by_metrics_that_the_server_has(capsys):
    made = deploy(capsys, TPU, "--min-replicas=2", "--max-replicas=5")
    spec = made["HorizontalPodAutoscaler"]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 5)
    assert "replicas" not in made["Deployment"]["spec"]
    names = [each["pods"]["metric"]["name"] for each in spec["metrics"]]
    assert names == list(SCALED_BY)
    router = SimpleNamespace(
        late_compiles=0,
        late_compile_seconds=0,
        invariant_violations=0,
        replicas=(),
        stats=Stats(1, 1, 2, 1, 0, 1, 0, 0, 0),
        num_up=1,
    )
    text = Metrics("m").render(router, dict).decode()
    for name in names:
        assert f"# TYPE {name} gauge\n" in text
    assert "HorizontalPodAutoscaler" not in deploy(capsys, TPU)


def test_tpu_hosts_are_a_group_in_which_the_leader_answers(capsys):
    made = deploy(capsys, TPUS, "--max-replicas=2")
    workload = made["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert workload["size"] == 4
    leader, worker = (workload[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    assert "readinessProbe" in leader
    assert "startupProbe" in leader
    assert "livenessProbe" in leader
    assert not {name for name in worker if name.endswith("Probe")}
    assert leader["args"] == worker["args"]
    assert "--num_hosts=4" in leader["args"]
    assert leader["resources"] == worker["resources"] == {
        "requests": {"google.com/tpu": "4"}, "limits": {"google.com/tpu": "4"}
    }  # fmt: skip
    for template in (workload["leaderTemplate"], workload["workerTemplate"]):
        assert template["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    leader_labels, worker_labels = (workload[f"{name}Template"]["metadata"]["labels"] for name in ("leader", "worker"))
    for selector in (made["Service"]["spec"]["selector"], made["PodMonitor"]["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= leader_labels.items()
        assert not selector.items() <= worker_labels.items()
    assert made["Service"]["metadata"]["name"] != made["LeaderWorkerSet"]["metadata"]["name"]
    assert made["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"


def test_tpu_hosts_find_each_other_by_what_a_leader_worker_set_tells_them(capsys):
    """Which is, as its controller has it: the pods' names in its own service, and the number of each."""
    made = deploy(capsys, TPUS)["LeaderWorkerSet"]
    arguments = made["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["args"]
    name = made["metadata"]["name"]
    pods = [f"{name}-0.{name}", *(f"{name}-0-{index}.{name}" for index in range(1, 4))]
    told = {"TPU_WORKER_HOSTNAMES": ",".join(pods), "TPU_WORKER_ID": "2"}
    place = find_place(Config.from_args(arguments), told)
    assert (place.rank, place.num_hosts, str(place.coordinator)) == (2, 4, f"{name}-0.{name}:7090")


def test_gpu_hosts_find_each_other_by_the_flags(capsys):
    made = deploy(capsys, *GPUS)["LeaderWorkerSet"]
    arguments = made["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["args"]
    told = {"$(LWS_LEADER_ADDRESS)": "group-0.group.default", "$(LWS_WORKER_INDEX)": "1"}
    for variable, value in told.items():
        arguments = [each.replace(variable, value) for each in arguments]
    place = find_place(Config.from_args(arguments), {})
    assert (place.rank, place.num_hosts, str(place.coordinator)) == (1, 2, "group-0.group.default:7090")


def test_secrets_are_references(capsys):
    argv = (
        "--secret-env=HF_TOKEN=hugging-face/token",
        "--secret-env=HEXLLM_API_KEYS=keys/one",
        "--env=HEX_LLM_LOG_LEVEL=info",
    )
    made = deploy(capsys, TPU, *argv)
    assert container_of(made["Deployment"])["env"] == [
        {"name": "HEX_LLM_LOG_LEVEL", "value": "info"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}}},
        {"name": "HEXLLM_API_KEYS", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "one"}}},
    ]
    (endpoint,) = made["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {"type": "Bearer", "credentials": {"name": "keys", "key": "one"}}


def test_the_pod_monitor_can_be_left_out(capsys):
    assert "PodMonitor" not in deploy(capsys, TPU, "--no-monitor")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--env=HF_TOKEN=hf_secret"], "use --secret_env=NAME=SECRET/KEY"),
        (["--secret-env=HF_TOKEN=hf_secret"], "'HF_TOKEN' needs NAME=SECRET/KEY"),
        (["--name=!"], "'!' makes no name for Kubernetes"),
        (["--", "--port=0"], "--port=0: whoever sends requests"),
        (["--", "--ssl_certfile=a.pem"], "TLS ends before the server"),
        (["--", "--num_hosts=4", "--worker_distributed_method=ray"], "`hex-llm deploy ray` is for"),
        (["--", "--nonsense"], "There is no flag --nonsense"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_printed(argv, message, capsys):
    assert cli.main(["deploy", "gke", TPU, IMAGE, *argv]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert "hf_secret" not in err
