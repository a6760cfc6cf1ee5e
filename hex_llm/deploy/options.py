"""What all `hex-llm deploy` commands are told: their flags, and after `--` those of the server."""

from collections.abc import Sequence
from dataclasses import dataclass

from hex_llm.deploy.environment import ENV_HELP
from hex_llm.errors import ConfigError
from hex_llm.flags import FlagParser, flag, flags_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The flags that take one value or none."""

    image: str | None = flag(
        "What is deployed", None, "The image that docker/Dockerfile makes, where it was pushed to."
    )
    name: str | None = flag(
        "What is deployed", None, "What it is called. Without it, the last part of the model's name."
    )
    machine_type: str | None = flag(
        "Machines", None, "As Google Cloud names it. Without it, the one that `hex-llm models MODEL` shows first."
    )
    tpu_topology: str | None = flag(
        "Machines", None, "How the chips of a TPU slice lie, such as 4x4. Without it, by machine type and --num_hosts."
    )
    min_replicas: int = flag("Machines", 1, "Fewest copies of the server, each on machines of its own.")
    max_replicas: int | None = flag("Machines", None, "Most copies. Without it, as many as --min_replicas.")
    shared_memory_mb: int = flag("Machines", 16 * 1024, "MiB of shared memory of each container.")
    service_account: str | None = flag("Machines", None, "Who the server is, to Google Cloud or to the cluster.")

    def __post_init__(self) -> None:
        for each in flags_of(type(self)):
            object.__setattr__(self, each.name, each.accept(getattr(self, each.name)))
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ConfigError(f"--max_replicas={self.max_replicas} is less than --min_replicas={self.min_replicas}.")


@dataclass(frozen=True, slots=True)
class Told[Flags: Options]:
    """All that the command line has said."""

    options: Flags
    model: str | None
    server: tuple[str, ...]  # the words after --
    env: tuple[str, ...]
    secret: tuple[str, ...]


def read[Flags: Options](
    kind: type[Flags], target: str, summary: str, secret: tuple[str, str, str], argv: Sequence[str]
) -> Told[Flags]:
    """`secret` is the flag for secrets, which is another for each target: its name, its value's form and its help."""
    parser = FlagParser(f"hex-llm deploy {target}", summary, flags_of(kind))
    parser.usage = "%(prog)s [MODEL] [flags] [-- flags of the server]"
    flag_name, form, help = secret
    group = parser.add_argument_group("Environment")
    group.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help=ENV_HELP)
    group.add_argument(f"--{flag_name}", dest="secret", action="append", default=[], metavar=form, help=help)
    end = list(argv).index("--") if "--" in argv else len(argv)
    arguments, words = parser.parse(argv[:end], {})
    if len(words) > 1:
        raise ConfigError(
            f"Of {' '.join(map(repr, words))} only one can be the model; the server's flags come after --."
        )
    given = {each.name: getattr(arguments, each.name) for each in flags_of(kind) if each.name in arguments}
    return Told(
        options=kind(**given),
        model=words[0] if words else None,
        server=tuple(argv[end + 1 :]),
        env=tuple(arguments.env),
        secret=tuple(arguments.secret),
    )
