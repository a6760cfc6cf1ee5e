"""`hex-llm deploy vertex`: the calls of the guides, field by field, as a program and as requests of the real SDK."""

import ast
import sys
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud.aiplatform_v1.types import AcceleratorType

from hex_llm import cli
from hex_llm.catalog.index import ENTRIES
from hex_llm.deploy.machine import KNOWN, find_machine
from tests.deploy.fake_vertex import FakeVertex
from tests.deploy.guides import ACCOUNT, GUIDES, IMAGE, REGION, Guide

BASE = ["deploy", "vertex", "google/gemma-2-9b-it", f"--image={IMAGE}"]


def calls_of(program: str) -> dict[str, tuple[str | None, dict[str, Any]]]:
    """The calls in a program: what takes their results, and their arguments; a name or a subscript as its text."""
    calls = {}
    for statement in ast.parse(program).body[1:]:
        if isinstance(statement, ast.ImportFrom):
            continue
        assert isinstance(statement, ast.Assign | ast.Expr)
        target = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else None
        call = statement.value
        assert isinstance(call, ast.Call)
        assert not call.args
        calls[ast.unparse(call.func)] = (target, {each.arg: _literal(each.value) for each in call.keywords})
    return calls


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Dict):
        return {_literal(name): _literal(value) for name, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    return node.value if isinstance(node, ast.Constant) else ast.unparse(node)


def without_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """To import it is an error, also where it was imported before."""
    monkeypatch.setitem(sys.modules, "google.cloud.aiplatform", None)
    monkeypatch.delattr("google.cloud.aiplatform", raising=False)


def dry_run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str | None, dict[str, Any]]]:
    assert cli.main([*argv[:2], "--dry-run", *argv[2:]]) == 0
    return calls_of(capsys.readouterr().out)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.id)
def test_the_dry_run_prints_the_calls_of_the_guides(guide: Guide, capsys):
    assert dry_run(["deploy", "vertex", *guide.argv], capsys) == {
        "aiplatform.Model.upload": ("model", guide.upload),
        "aiplatform.Endpoint.create": ("endpoint", guide.create),
        "model.deploy": (None, {"endpoint": "endpoint"} | guide.deploy),
    }


@pytest.fixture
def vertex(monkeypatch):
    """The real SDK, whose channels lead to a server on loopback."""
    import grpc
    from google.cloud import aiplatform
    from google.cloud.aiplatform_v1.services.endpoint_service.transports import EndpointServiceGrpcTransport
    from google.cloud.aiplatform_v1.services.model_service.transports import ModelServiceGrpcTransport

    fake = FakeVertex()
    with fake.listening() as address:
        for transport in (ModelServiceGrpcTransport, EndpointServiceGrpcTransport):
            channel = classmethod(lambda cls, *args, **kwargs: grpc.insecure_channel(address))
            monkeypatch.setattr(transport, "create_channel", channel)
        aiplatform.init(project="a-project", location=REGION, credentials=AnonymousCredentials())
        yield fake
        aiplatform.initializer.global_config.__init__()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.id)
def test_the_sdk_makes_the_requests_of_the_guides(guide: Guide, vertex: FakeVertex, capsys):
    assert cli.main(["deploy", "vertex", *guide.argv]) == 0
    assert capsys.readouterr().out == f"Deployed to projects/a-project/locations/{REGION}/endpoints/8\n"
    assert [name for name, _ in vertex.requests] == ["UploadModel", "CreateEndpoint", "DeployModel"]
    upload, create, deploy = (request for _, request in vertex.requests)
    assert upload.parent == create.parent == f"projects/a-project/locations/{REGION}"
    assert upload.model.display_name == guide.name
    container = upload.model.container_spec
    assert container.image_uri == IMAGE
    assert list(container.command) == guide.upload["serving_container_command"]
    assert list(container.args) == list(guide.arguments)
    assert {each.name: each.value for each in container.env} == guide.environment
    assert [port.container_port for port in container.ports] == [7080]
    assert (container.predict_route, container.health_route) == ("/generate", "/ping")
    assert container.shared_memory_size_mb == 16384
    assert container.deployment_timeout.total_seconds() == 7200
    assert create.endpoint.display_name == f"{guide.name}-endpoint"
    assert deploy.endpoint.endswith("/endpoints/8")
    assert deploy.deployed_model.model.endswith("/models/7@1")
    assert deploy.deployed_model.service_account == ACCOUNT
    resources = deploy.deployed_model.dedicated_resources
    assert resources.machine_spec.machine_type == guide.machine
    assert resources.machine_spec.tpu_topology == (guide.topology or "")
    assert (resources.min_replica_count, resources.max_replica_count) == (1, 1)


def test_a_failure_is_told_with_what_is_there_already(vertex: FakeVertex, capsys):
    vertex.refused = "DeployModel"
    assert cli.main(BASE) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hex-llm: model.deploy has failed: 429 no chips are left")
    assert "/models/7" in error
    assert "/endpoints/8" in error


def test_an_endpoint_that_exists_is_taken(vertex: FakeVertex, capsys):
    assert cli.main([*BASE, "--endpoint=123456"]) == 0
    assert [name for name, _ in vertex.requests] == ["UploadModel", "DeployModel"]
    assert vertex.requests[1][1].endpoint.endswith("/endpoints/123456")


def test_a_secret_is_passed_and_never_printed(vertex: FakeVertex, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_not_to_be_seen")
    argv = [*BASE, "--pass-env=HF_TOKEN"]
    assert cli.main([*argv, "--dry-run"]) == 0
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert "hf_not_to_be_seen" not in out + err
    assert 'os.environ["HF_TOKEN"]' in out
    assert [(each.name, each.value) for each in vertex.requests[0][1].model.container_spec.env] == [
        ("HF_TOKEN", "hf_not_to_be_seen")
    ]


def test_a_gpu_is_named_and_counted(capsys):
    calls = dry_run(["deploy", "vertex", "a/b", f"--image={IMAGE}", "--machine-type=a3-ultragpu-8g"], capsys)
    deploy = calls["model.deploy"][1]
    assert (deploy["accelerator_type"], deploy["accelerator_count"]) == ("NVIDIA_H200_141GB", 8)
    assert "--tensor_parallel_size=8" in calls["aiplatform.Model.upload"][1]["serving_container_args"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_known_model_can_be_deployed_by_its_name(entry, capsys):
    calls = dry_run(["deploy", "vertex", entry.name, f"--image={IMAGE}"], capsys)
    first = entry.recommended[0]
    assert calls["model.deploy"][1]["machine_type"] == first.machine
    hosts = first.flags.get("num_hosts", 1)
    assert ("tpu_topology" in calls["model.deploy"][1]) == (hosts > 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--", "--max_modle_len=5"], "There is no flag --max_modle_len; did you mean --max_model_len?"),
        (["--", "--block_size=7"], "--block_size=7 is not one of"),
        (["--", "--model=a/b"], "'google/gemma-2-9b-it' and --model=a/b name two models"),
        (["--", "--tensor_parallel_size=8"], "num_request_devices 8 > num_available_devices 4"),
        (["--machine-type=ct6e-standard-1t"], "No flags are known for google/gemma-2-9b-it on ct6e-standard-1t"),
        (["--", "--num_hosts=2", "--host_rank=1"], "--host_rank=1: all hosts get the same flags"),
        (["--", "--num_hosts=3"], "There is no slice of 3 machines ct5lp-hightpu-4t."),
        (["--tpu-topology=4x4"], "--tpu_topology=4x4 is of 16 chips; 1 of ct5lp-hightpu-4t (--num_hosts=1) have 4."),
        (["--tpu-topology=big"], "--tpu_topology=big is not of the form"),
        (["--machine-type=ct9-4t"], "--machine_type=ct9-4t is none that is known."),
        (
            ["--machine-type=a3-highgpu-8g", "--", "--num_hosts=2"],
            "on Vertex AI, several hosts are those of a TPU slice",
        ),
        (["--", "--num_hosts=4", "--worker_distributed_method=ray"], "on Vertex AI there is no Ray cluster"),
        (["--env=HF_TOKEN=hf_secret"], "use --pass_env=NAME"),
        (["--env=nothing"], "--env=nothing is not NAME=VALUE."),
        (["--env=A=1", "--env=A=2"], "The environment variable A is given twice."),
        (["--pass-env=NOT_THERE"], "--pass_env=NOT_THERE: there is no such environment variable here."),
        (["--max-replicas=1", "--min-replicas=2"], "--max_replicas=1 is less than --min_replicas=2."),
        (["again"], "only one can be the model"),
        (["--imgae=x"], "There is no flag --imgae; did you mean --image?"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(argv, message, capsys, monkeypatch):
    without_sdk(monkeypatch)
    assert cli.main([*BASE, *argv]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "hf_secret" not in out + err
    assert err.count("\n") == 1


def test_without_a_model_an_image_or_a_machine_it_says_what_to_give(capsys):
    assert cli.main(["deploy", "vertex", f"--image={IMAGE}"]) == 2
    assert "Name the model" in capsys.readouterr().err
    assert cli.main(["deploy", "vertex", "google/gemma-2-9b-it"]) == 2
    assert "--image=" in capsys.readouterr().err
    assert cli.main(["deploy", "vertex", "who/knows", f"--image={IMAGE}"]) == 2
    assert "No machine is known for who/knows" in capsys.readouterr().err


def test_without_the_sdk_the_extra_is_named(monkeypatch, capsys):
    without_sdk(monkeypatch)
    assert cli.main(BASE) == 2
    assert "pip install '.[vertex]' in a checkout" in capsys.readouterr().err


def test_the_machines_of_the_catalog_are_known():
    for entry in ENTRIES:
        for each in entry.recommended:
            machine = find_machine(each.machine)
            assert each.flags["tensor_parallel_size"] <= machine.devices * each.flags.get("num_hosts", 1)


def test_accelerators_have_the_names_that_the_sdk_knows():
    assert {machine.vertex for machine in KNOWN.values() if machine.vertex} <= {each.name for each in AcceleratorType}
