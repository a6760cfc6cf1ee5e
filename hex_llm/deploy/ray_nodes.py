"""`python -m hex_llm.deploy.ray_nodes RESOURCE HOSTS`: waits for the hosts of a Ray cluster.

The server asks the cluster what it has when it starts, and takes what is there; hosts of a cluster join one by one.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hex_llm.command import run_command
from hex_llm.errors import ConfigError

logger = logging.getLogger(__name__)

_POLL_S = 2.0


def num_nodes(nodes: Sequence[Mapping[str, Any]], resource: str) -> int:
    """How many nodes have any of a resource, of those that Ray lists."""
    return sum(bool(node["Alive"] and node["Resources"].get(resource)) for node in nodes)


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2 or not argv[1].isdecimal():
        raise ConfigError("Usage: python -m hex_llm.deploy.ray_nodes RESOURCE HOSTS")
    resource, hosts = argv[0], int(argv[1])
    import ray  # of the extra

    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level=logging.WARNING)
    told = -1
    while (there := num_nodes(ray.nodes(), resource)) < hosts:
        if there != told:
            logger.info("%d of %d hosts with %s are there.", there, hosts, resource)
            told = there
        time.sleep(_POLL_S)
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
