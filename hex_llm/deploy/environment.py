"""The environment variables of a server that is deployed. Those that are secrets are told by where they are, never by
their value, so that no command line, manifest or output has it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hex_llm.errors import ConfigError

SECRETS = ("HF_TOKEN", "HEXLLM_API_KEYS", "HEXLLM_CLUSTER_KEY")
ENV_HELP = "An environment variable of the server; may be given several times."

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_SECRET_KEY = re.compile(r"[-._A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A key of a Kubernetes Secret."""

    secret: str
    key: str


def plain_variables(given: Iterable[str], hint: str) -> dict[str, str]:
    """The variables of NAME=VALUE each; `hint` is the flag to use for a secret."""
    variables: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if name in SECRETS:
            raise ConfigError(f"--env={name}=... would show a secret to everybody who sees the command; use {hint}.")
        if not equals or not _NAME.fullmatch(name):
            raise ConfigError(f"--env={name[:200]} is not NAME=VALUE.")
        _add(variables, name, value)
    return variables


def secret_variables(given: Iterable[str], others: Mapping[str, str]) -> dict[str, SecretKey]:
    """The variables of NAME=SECRET/KEY each, none of which is among the others."""
    variables: dict[str, SecretKey] = {}
    for each in given:
        name, _, place = each.partition("=")
        secret, _, key = place.partition("/")
        if not (_NAME.fullmatch(name) and _SECRET_NAME.fullmatch(secret) and _SECRET_KEY.fullmatch(key)):
            raise ConfigError(f"--secret_env: {name[:200]!r} needs NAME=SECRET/KEY, the key of a Kubernetes Secret.")
        _add(variables, name, SecretKey(secret, key), others)
    return variables


def passed_variables(given: Iterable[str], others: Mapping[str, str]) -> tuple[str, ...]:
    """The names of variables of this process that the server gets too."""
    variables: dict[str, None] = {}
    for name in given:
        if not _NAME.fullmatch(name):
            raise ConfigError("--pass_env takes the name of an environment variable, and no value.")
        _add(variables, name, None, others)
    return tuple(variables)


def _add[Value](variables: dict[str, Value], name: str, value: Value, others: Mapping[str, str] | None = None) -> None:
    if name in variables or name in (others or {}):
        raise ConfigError(f"The environment variable {name} is given twice.")
    variables[name] = value
