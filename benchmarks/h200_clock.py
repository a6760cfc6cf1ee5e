"""How long the device takes for a call, without what the host takes to launch it."""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# Options for what is part of a chain of kernels, as `runner.xla_options` has them.
CHAIN = {"xla_gpu_enable_command_buffer": ""}
_PLUG_SIZE = 8192


def require_gpu() -> None:
    """Ends a benchmark that says nothing elsewhere."""
    if (found := jax.default_backend()) != "gpu":
        sys.exit(f"This benchmark needs an NVIDIA GPU of the Hopper generation; JAX has found none, but: {found}.")


@jax.jit
def _plug(x: Array) -> Array:
    """Some milliseconds of work, behind which the host queues what is to be timed."""
    return lax.fori_loop(0, 8, lambda _, y: (x @ y) * 1e-2, x)


def seconds(call: Callable[..., Any], *arguments: Any, repeats: int = 20, trials: int = 4) -> float:
    """Of one call among `repeats`, by the median of several trials; each is the difference to a trial without calls."""
    size = _PLUG_SIZE if jax.default_backend() == "gpu" else 64
    block = jnp.ones((size, size), jnp.bfloat16)
    jax.block_until_ready((_plug(block), call(*arguments)))
    differences = []
    for _ in range(trials):
        times = []
        for count in (0, repeats):
            started = time.perf_counter()
            out = _plug(block)
            for _ in range(count):
                out = call(*arguments)
            jax.block_until_ready(out)
            times.append(time.perf_counter() - started)
        differences.append(times[1] - times[0])
    return float(np.median(differences)) / repeats
