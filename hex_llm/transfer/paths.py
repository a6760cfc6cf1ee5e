"""Which way blocks go from one engine to another."""

import secrets
from typing import Literal

from hex_llm.transfer.words import Hello

type Path = Literal["device", "jax", "host"]
type Asked = Literal["auto", "device", "jax", "host"]

PROCESS = secrets.token_hex(16)  # tells this process from all others


class Unfit(Exception):
    """Two engines cannot hand blocks to each other, or not in the way that was asked for."""


def choose(asked: Asked, here: Hello, there: Hello) -> Path:
    """The way from `there` to `here`.

    device: `jax.device_put`, between engines of one process.
    jax: `jax.experimental.transfer`, between processes whose engines have as many devices, in the same order. Its bytes
    are not signed, and on CPUs it is several times slower than the way through the host's memory, so that it is taken
    only where it is asked for.
    host: the host's memory, shared where both engines are on one machine, else over a signed connection.
    """
    if here.layout != there.layout:
        raise Unfit(f"its blocks look like {there.layout}, and those here like {here.layout}")
    same_process = here.process == there.process
    match asked:
        case "auto":
            return "device" if same_process else "host"
        case "device" if not same_process:
            raise Unfit("--kv_transfer_path=device needs both engines in one process")
        case "jax" if same_process:
            raise Unfit("--kv_transfer_path=jax needs engines in processes of their own")
        case "jax" if not (here.transfer_server and there.transfer_server):
            raise Unfit(
                "--kv_transfer_path=jax is not to be had: only one of the two engines has JAX's transfer server"
            )
        case "jax" if (here.platform, here.num_devices, here.split) != (there.platform, there.num_devices, there.split):
            raise Unfit(
                "--kv_transfer_path=jax needs engines that have the same devices, and there are"
                f" {there.num_devices} ({there.platform}) there and {here.num_devices} ({here.platform}) here"
            )
    return asked
