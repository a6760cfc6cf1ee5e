"""`hex-llm deploy vertex`: a server behind an endpoint of Vertex AI, by the calls that Hex-LLM's notebooks make."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hex_llm.deploy.calls import Call, Result, Variable, make, show, variables
from hex_llm.deploy.deployment import COMMAND, HEALTH_ROUTE, PREDICT_ROUTE, START_S, Deployment, settle
from hex_llm.deploy.environment import passed_variables, plain_variables
from hex_llm.deploy.options import Options, read
from hex_llm.errors import ConfigError, StartError
from hex_llm.flags import flag

logger = logging.getLogger(__name__)

SUMMARY = "Deploy a model to an endpoint of Vertex AI."
_IMPORTS = "from google.cloud import aiplatform"
_PASS_ENV = (
    "pass-env",
    "NAME",
    "An environment variable of this command that the server gets too, such as HF_TOKEN; may be given several times."
    " Its value is not shown, but those who may see the model in Vertex AI can see it there.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VertexOptions(Options):
    project: str | None = flag("Vertex AI", None, "The project. Without it, the one that Google's tools are set to.")
    location: str | None = flag("Vertex AI", None, "The region, such as us-west1. Without it, the SDK's own default.")
    endpoint: str | None = flag(
        "Vertex AI", None, "The number or name of an endpoint that exists. Without it, a new one."
    )
    dedicated_endpoint: bool = flag("Vertex AI", False, "Give a new endpoint a network address of its own.")
    deployment_timeout_s: int = flag("Vertex AI", START_S, "Seconds that the server may take to start.")
    deploy_request_timeout_s: int = flag("Vertex AI", 1800, "Seconds that the request to deploy may take.")
    dry_run: bool = flag("Vertex AI", False, "Print the calls as a Python program, and make none.")


def main(argv: Sequence[str]) -> None:
    told = read(VertexOptions, "vertex", SUMMARY, _PASS_ENV, argv)
    environment = plain_variables(told.env, "--pass_env=NAME")
    passed = passed_variables(told.secret, environment)
    calls = plan(settle(told.options, told.model, told.server, environment), told.options, passed)
    if told.options.dry_run:
        print(show(calls, _IMPORTS))
    else:
        endpoint = deploy(calls, os.environ)
        print(f"Deployed to {endpoint.resource_name}")


def plan(deployment: Deployment, options: VertexOptions, passed: Sequence[str] = ()) -> list[Call]:
    """The calls of google-cloud-aiplatform. An argument that nobody has given is left to the SDK."""
    config = deployment.config
    if config.num_hosts > 1 and config.worker_distributed_method == "ray":
        raise ConfigError("--worker_distributed_method=ray: on Vertex AI there is no Ray cluster of several hosts.")
    if config.num_hosts > 1 and deployment.machine.platform != "tpu":
        raise ConfigError(f"--num_hosts={config.num_hosts}: on Vertex AI, several hosts are those of a TPU slice.")
    where = _given(project=options.project, location=options.location)
    return [
        _upload(deployment, options, passed, where),
        _endpoint(deployment, options, where),
        _deploy(deployment, options),
    ]


def _upload(deployment: Deployment, options: VertexOptions, passed: Sequence[str], where: Mapping[str, str]) -> Call:
    environment = dict(deployment.environment) | {name: Variable(name) for name in passed}
    arguments = {
        "display_name": deployment.name,
        "serving_container_image_uri": deployment.image,
        "serving_container_command": list(COMMAND),
        "serving_container_args": list(deployment.arguments),
        "serving_container_ports": [deployment.config.port],
        "serving_container_predict_route": PREDICT_ROUTE,
        "serving_container_health_route": HEALTH_ROUTE,
        "serving_container_environment_variables": environment or None,
        "serving_container_shared_memory_size_mb": deployment.shared_memory_mb,
        "serving_container_deployment_timeout": options.deployment_timeout_s,
    }
    return Call("aiplatform.Model.upload", _given(**arguments, **where), result="model")


def _endpoint(deployment: Deployment, options: VertexOptions, where: Mapping[str, str]) -> Call:
    if options.endpoint is not None:
        return Call("aiplatform.Endpoint", {"endpoint_name": options.endpoint, **where}, result="endpoint")
    arguments = _given(
        display_name=f"{deployment.name}-endpoint", dedicated_endpoint_enabled=options.dedicated_endpoint or None
    )
    return Call("aiplatform.Endpoint.create", {**arguments, **where}, result="endpoint")


def _deploy(deployment: Deployment, options: VertexOptions) -> Call:
    machine = deployment.machine
    several = deployment.config.num_hosts > 1
    arguments = {
        "endpoint": Result("endpoint"),
        "machine_type": machine.name,
        "accelerator_type": machine.vertex or None,
        "accelerator_count": machine.devices if machine.vertex else None,
        "tpu_topology": deployment.topology if several or options.tpu_topology else None,
        "deploy_request_timeout": options.deploy_request_timeout_s,
        "service_account": deployment.service_account,
        "min_replica_count": deployment.min_replicas,
        "max_replica_count": deployment.max_replicas,
    }
    return Call("model.deploy", _given(**arguments))


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def deploy(calls: Sequence[Call], environment: Mapping[str, str]) -> Any:
    """Makes the calls; returns the endpoint. What goes wrong is told with what is there already."""
    if missing := [name for name in variables(calls) if name not in environment]:
        raise ConfigError(f"--pass_env={missing[0]}: there is no such environment variable here.")
    try:
        from google.api_core.exceptions import GoogleAPICallError  # of the extra, and slow to import
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import aiplatform
    except ImportError as error:
        raise ConfigError(
            f"Vertex AI's SDK is an extra: pip install '.[vertex]' in a checkout; --dry_run does without. ({error})"
        ) from None
    names: dict[str, Any] = {"aiplatform": aiplatform}
    for call in calls:
        logger.info("%s ...", call.function)
        try:
            make(call, names, environment)
        except (GoogleAPICallError, GoogleAuthError, RuntimeError, ValueError) as error:
            made = [f"{name} {names[name].resource_name}" for name in ("model", "endpoint") if name in names]
            there = f" What was made before is still there: {', '.join(made)}." if made else ""
            raise StartError(f"{call.function} has failed: {' '.join(str(error).split())}{there}") from error
    return names["endpoint"]
