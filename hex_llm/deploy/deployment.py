"""What is deployed, wherever that is: an image, the server's arguments, and machines for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hex_llm.catalog.entry import Recommendation
from hex_llm.catalog.index import find
from hex_llm.config import Config
from hex_llm.deploy.machine import Machine, find_machine
from hex_llm.deploy.options import Options
from hex_llm.errors import ConfigError
from hex_llm.flags import flags_of

# As the image has it, and as Hex-LLM's users write it.
COMMAND = ("python", "-m", "hex_llm.server.api_server")
PREDICT_ROUTE, HEALTH_ROUTE, LIVE_ROUTE, METRICS_ROUTE = "/generate", "/ping", "/live", "/metrics"
# The first start downloads the model and compiles every step.
START_S = 7200


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    name: str
    image: str
    arguments: tuple[str, ...]  # of the server, as they are sent
    config: Config  # what the server makes of them
    environment: Mapping[str, str]  # without what is secret
    machine: Machine
    topology: str | None  # of TPU chips
    min_replicas: int
    max_replicas: int
    shared_memory_mb: int
    service_account: str | None


def settle(options: Options, model: str | None, server: Sequence[str], environment: Mapping[str, str]) -> Deployment:
    """All of it, checked; ConfigError for whatever the server would refuse.

    `server` are its flags, as they are to be sent. Without any, they are those that the catalog has for the model.
    """
    given = Config.from_args(server)
    model = _one_model(model, given.model)
    recommended = _recommended(model, options.machine_type)
    machine = _machine(model, options.machine_type, recommended)
    if not server:
        arguments = _arguments(model, machine, recommended)
    else:
        arguments = tuple(server) if given.model else (f"--model={model}", *server)
    config = Config.from_args(arguments)
    _check_server(config)
    _check_devices(config, machine)
    if options.image is None:
        raise ConfigError("--image= names the image to deploy; docker/Dockerfile makes it.")
    return Deployment(
        name=options.name or model.rstrip("/").rpartition("/")[2].partition("@")[0],
        image=options.image,
        arguments=arguments,
        config=config,
        environment=environment,
        machine=machine,
        topology=_topology(machine, config.num_hosts, options.tpu_topology),
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas or options.min_replicas,
        shared_memory_mb=options.shared_memory_mb,
        service_account=options.service_account,
    )


def _one_model(word: str | None, flag: str | None) -> str:
    if word and flag and word != flag:
        raise ConfigError(f"{word!r} and --model={flag} name two models; give one.")
    if model := word or flag:
        return model
    raise ConfigError("Name the model to deploy: of the Hugging Face Hub, or gs://BUCKET/PATH.")


def _recommended(model: str, machine_type: str | None) -> Recommendation | None:
    entry = find(model.partition("@")[0])
    fitting = (each for each in (entry.recommended if entry else ()) if machine_type in (None, each.machine))
    return next(fitting, None)


def _machine(model: str, machine_type: str | None, recommended: Recommendation | None) -> Machine:
    if machine_type is not None:
        return find_machine(machine_type)
    if recommended is None:
        raise ConfigError(f"No machine is known for {model}; give --machine_type=, such as ct5lp-hightpu-4t.")
    return find_machine(recommended.machine)


def _arguments(model: str, machine: Machine, recommended: Recommendation | None) -> tuple[str, ...]:
    if recommended is None and find(model.partition("@")[0]) and machine.platform != "cpu":
        raise ConfigError(
            f"No flags are known for {model} on {machine.name}: give them behind --, as"
            f" `hex-llm plan {model} --machine={machine.name}` has them."
        )
    flags = recommended.flags if recommended else {"tensor_parallel_size": max(machine.devices, 1)}
    by_name = {flag.name: flag for flag in flags_of(Config)}
    shown = (by_name[name].show(value) for name, value in flags.items())
    return ("--host=0.0.0.0", "--port=7080", f"--model={model}", *shown)


def _check_server(config: Config) -> None:
    """Raises ConfigError for flags that only make sense where somebody starts the server by hand."""
    if config.port == 0:
        raise ConfigError("--port=0: whoever sends requests to the server has to know its port.")
    if config.ssl_certfile is not None:
        raise ConfigError(f"--ssl_certfile={config.ssl_certfile}: probes speak http; TLS ends before the server.")
    for name in ("host_rank", "coordinator_address"):
        if (value := getattr(config, name)) is not None:
            raise ConfigError(f"--{name}={value}: all hosts get the same flags, and find out which they are.")


def _check_devices(config: Config, machine: Machine) -> None:
    wanted = sum(config.of_worker(index).tensor_parallel_size for index in range(config.num_engines))
    there = machine.devices * config.num_hosts
    if machine.platform != "cpu" and wanted > there:
        raise ConfigError(
            f"num_request_devices {wanted} > num_available_devices {there}: the server's flags ask for more than"
            f" {config.num_hosts} of {machine.name} have."
        )


def _topology(machine: Machine, hosts: int, given: str | None) -> str | None:
    if given is not None:
        machine.check_topology(given, hosts)
        return given
    return machine.topology(hosts) if machine.platform == "tpu" else None
