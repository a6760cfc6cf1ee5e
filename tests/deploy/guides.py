"""The deployments in Google's guides for Hex-LLM, as values: what a person gives, and the calls that are made there.

Source: "Serve open models using Hex-LLM premium container on Cloud TPU", cloud.google.com/vertex-ai, in the versions of
May 2025 and later. A value that is a name in the guides (a region, an image) has an example's value here.
"""

from dataclasses import dataclass
from typing import Any

IMAGE = "us-docker.pkg.dev/example/serving/hex-llm:1"
REGION = "us-west1"
ACCOUNT = "serving@example.iam.gserviceaccount.com"
ENV = {"MODEL_ID": "meta-llama/Llama-3.1-8B", "HEX_LLM_LOG_LEVEL": "info"}
ADDRESS = ("--host=0.0.0.0", "--port=7080")


@dataclass(frozen=True)
class Guide:
    id: str
    machine: str
    arguments: tuple[str, ...]
    name: str
    environment: dict[str, str]
    region: str | None = REGION
    topology: str | None = None

    @property
    def argv(self) -> list[str]:
        """The command that deploys it."""
        flags = [f"--name={self.name}", f"--image={IMAGE}", f"--machine-type={self.machine}"]
        flags += [
            f"--service-account={ACCOUNT}",
            *(f"--env={name}={value}" for name, value in self.environment.items()),
        ]
        flags += [f"--location={self.region}"] if self.region else []
        return [*flags, "--", *self.arguments]

    @property
    def upload(self) -> dict[str, Any]:
        """The arguments of Model.upload."""
        return {
            "display_name": self.name,
            "serving_container_image_uri": IMAGE,
            "serving_container_command": ["python", "-m", "hex_llm.server.api_server"],
            "serving_container_args": list(self.arguments),
            "serving_container_ports": [7080],
            "serving_container_predict_route": "/generate",
            "serving_container_health_route": "/ping",
            "serving_container_environment_variables": self.environment,
            "serving_container_shared_memory_size_mb": 16 * 1024,
            "serving_container_deployment_timeout": 7200,
        } | ({"location": self.region} if self.region else {})

    @property
    def create(self) -> dict[str, Any]:
        """Those of Endpoint.create, which only one guide shows."""
        return {"display_name": f"{self.name}-endpoint"} | ({"location": self.region} if self.region else {})

    @property
    def deploy(self) -> dict[str, Any]:
        """Those of deploy, but for the endpoint."""
        return {
            "machine_type": self.machine,
            "deploy_request_timeout": 1800,
            "service_account": ACCOUNT,
            "min_replica_count": 1,
            "max_replica_count": 1,
        } | ({"tpu_topology": self.topology} if self.topology else {})


def _eight(id: str, tensor_parallel: int, *more: str) -> Guide:
    arguments = (*ADDRESS, "--model=meta-llama/Llama-3.1-8B", "--data_parallel_size=1")
    arguments += (f"--tensor_parallel_size={tensor_parallel}", *more)
    return Guide(id, "ct5lp-hightpu-8t", arguments, "llama-3-1-8b", ENV)


GUIDES = [
    Guide(
        "multi-host",
        "ct5lp-hightpu-4t",
        (
            *ADDRESS,
            "--model=meta-llama/Meta-Llama-3.1-70B",
            "--data_parallel_size=1",
            "--tensor_parallel_size=16",
            "--num_hosts=4",
            "--hbm_utilization_factor=0.9",
        ),
        "llama-3-1-70b",
        ENV,
        topology="4x4",
    ),
    _eight("disaggregated", 2, "--disagg_topo=3,1", "--hbm_utilization_factor=0.9"),
    _eight("prefix caching", 4, "--hbm_utilization_factor=0.9", "--enable_prefix_cache_hbm"),
    _eight("prefix caching, as of May 2025", 2, "--hbm_utilization_factor=0.9", "--enable_prefix_cache_hbm"),
    _eight("chunked prefill", 4, "--hbm_utilization_factor=0.9", "--enable_chunked_prefill"),
    Guide(
        "notebook",
        "ct5lp-hightpu-4t",
        (
            "--model=google/gemma-2-9b-it",
            "--tensor_parallel_size=4",
            "--hbm_utilization_factor=0.8",
            "--max_running_seqs=512",
        ),
        "gemma-2-9b-it",
        {"PJRT_DEVICE": "TPU", "MODEL_ID": "google/gemma-2-9b-it", "DEPLOY_SOURCE": "notebook"},
        region=None,
    ),
    Guide(
        "sample for Llama 3.1 8B Instruct",
        "ct5lp-hightpu-4t",
        (
            "--model=meta-llama/Llama-3.1-8B-Instruct",
            "--tensor_parallel_size=4",
            "--max_model_len=4096",
            "--hbm_utilization_factor=0.95",
        ),
        "llama-3-1-8b-instruct",
        ENV,
    ),
    Guide(
        "sample for Llama 3.1 70B Instruct AWQ",
        "ct5lp-hightpu-4t",
        (
            "--model=hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4",
            "--tensor_parallel_size=4",
            "--max_model_len=4096",
            "--hbm_utilization_factor=0.45",
        ),
        "llama-3-1-70b-awq",
        ENV,
    ),
]
