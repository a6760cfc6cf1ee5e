"""`python -m hex_llm.server.api_server` and `hex-llm serve`: the server."""

import os
import sys
from collections.abc import Mapping, Sequence

from hex_llm.command import run_command
from hex_llm.config import config_parser, parse_config
from hex_llm.errors import ConfigError
from hex_llm.server.launch import serve


def main(argv: Sequence[str]) -> int:
    description = "Serve a model over HTTP; without one, the small model that comes with the package."
    parser = config_parser("hex-llm serve", description, server=True, **vertex_defaults(os.environ))
    config = parse_config(parser, argv)[0]
    check_vertex_routes(os.environ)
    return serve(config)


def vertex_defaults(environ: Mapping[str, str]) -> dict[str, str | int]:
    """What Vertex AI says in the environment, for flags that are not given."""
    defaults: dict[str, str | int] = {}
    if model := environ.get("AIP_STORAGE_URI"):
        defaults["model"] = model
    if port := environ.get("AIP_HTTP_PORT"):
        if not port.isdecimal():
            raise ConfigError(f"AIP_HTTP_PORT={port} is not a port.")
        defaults["port"] = int(port)
    return defaults


def check_vertex_routes(environ: Mapping[str, str]) -> None:
    for variable in ("AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE"):
        path = environ.get(variable)
        if path and (not path.startswith("/") or set(path) & set("?#% \t\n")):
            raise ConfigError(f"{variable}={path} is not a path that begins with / and has no ? # % or space.")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
