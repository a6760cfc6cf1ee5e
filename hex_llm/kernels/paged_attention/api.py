"""Paged attention, by the best implementation there is for the machine."""

from collections.abc import Callable

import jax

from hex_llm.kernels.paged_attention import reference, xla

IMPLEMENTATIONS: dict[str, Callable] = {"reference": reference.paged_attention, "xla": xla.paged_attention}
BEST = {"cpu": "xla", "gpu": "xla", "tpu": "xla"}


def paged_attention(*args, implementation: str | None = None, **options):
    """See `reference.paged_attention` for what it computes."""
    return IMPLEMENTATIONS[implementation or BEST[jax.default_backend()]](*args, **options)
