"""The `hex-llm` command.

A command's module is imported when it runs, and has a function `main(argv)` that may return an exit code.
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hex_llm.command import run_command
from hex_llm.config import flags_markdown
from hex_llm.errors import ConfigError
from hex_llm.flags import FlagParser
from hex_llm.version import __version__


class Command(NamedTuple):
    help: str
    run: Callable[[Sequence[str]], int | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code."""
    return run_command(_run, sys.argv[1:] if argv is None else list(argv))


def _run(argv: Sequence[str]) -> int | None:
    if argv[:1] == ["--version"]:
        return _version(argv[1:])
    for words in (2, 1):
        if command := COMMANDS.get(" ".join(argv[:words])):
            return command.run(argv[words:])
    wanted = [word for word in argv if word not in ("-h", "--help")]
    listed = {name: command for name, command in COMMANDS.items() if name.split()[: len(wanted)] == wanted}
    if not listed:
        raise ConfigError(_unknown(" ".join(wanted[:2])))
    print(_usage(listed))
    return 0 if len(wanted) < len(argv) else ConfigError.exit_code


def _unknown(name: str) -> str:
    names = {*COMMANDS, *(known.split()[0] for known in COMMANDS)}
    close = difflib.get_close_matches(name, sorted(names), n=1)
    hint = f"did you mean {close[0]!r}?" if close else "hex-llm --help lists those there are."
    return f"There is no command {name!r}; {hint}"


def _usage(commands: dict[str, Command]) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in commands.items()]
    return "\n".join(
        ["usage: hex-llm COMMAND [flags]", "", "commands:", *lines, "", "hex-llm COMMAND --help lists its flags."]
    )


def _in(module: str) -> Callable[[Sequence[str]], int | None]:
    return lambda argv: importlib.import_module(module).main(argv)


def _version(argv: Sequence[str]) -> None:
    FlagParser("hex-llm version", COMMANDS["version"].help, flags=()).parse_args(argv)
    print(f"hex-llm {__version__}")


def _flags(argv: Sequence[str]) -> None:
    FlagParser("hex-llm flags", COMMANDS["flags"].help, flags=()).parse_args(argv)
    print(flags_markdown(), end="")


COMMANDS = {
    "serve": Command("Serve a model over HTTP.", _in("hex_llm.server.api_server")),
    "chat": Command("Talk to a model in the terminal.", _in("hex_llm.chat_cli")),
    "bench offline": Command("Measure the engine without a server.", _in("hex_llm.bench.offline")),
    "bench serve": Command("Measure a server under load.", _in("hex_llm.bench.serving")),
    "bench plan-disagg": Command(
        "Simulate which split into prefill and decode workers meets targets.", _in("hex_llm.bench.disagg.command")
    ),
    "plan": Command(
        "Plan on which machine to serve a model, with which flags, how fast and at what cost.", _in("hex_llm.plan_cli")
    ),
    "tune": Command("Try flags of a server here, and say which are fastest.", _in("hex_llm.bench.tune.command")),
    "models": Command("List the models that are known by name, or show one.", _in("hex_llm.models_cli")),
    "deploy vertex": Command("Deploy a model to an endpoint of Vertex AI.", _in("hex_llm.deploy.vertex")),
    "deploy gke": Command("Print manifests for Kubernetes, with TPU slices or GPUs of GKE.", _in("hex_llm.deploy.gke")),
    "deploy ray": Command(
        "Print manifests for a Ray cluster on Kubernetes, by the KubeRay operator.", _in("hex_llm.deploy.ray_cluster")
    ),
    "flags": Command("Print every flag as Markdown.", _flags),
    "version": Command("Print the version.", _version),
}


if __name__ == "__main__":
    sys.exit(main())
