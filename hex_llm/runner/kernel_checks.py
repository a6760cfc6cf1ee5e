"""Whether kernels do a model's attention and its products with weights in few bits, and a TPU's memories hold what
attention works with: asked before anything is loaded."""

import logging
from typing import Any

import jax
import jax.numpy as jnp

from hex_llm.errors import ConfigError
from hex_llm.kernels.hopper import is_hopper
from hex_llm.kernels.paged_attention.api import page_width
from hex_llm.kernels.quant_matmul.api import multiplied_as_it_lies
from hex_llm.kernels.quant_matmul.weight import Packed
from hex_llm.models.split import Split
from hex_llm.parallel.backend import backend
from hex_llm.runner.programs import Programs

logger = logging.getLogger(__name__)


def check_attention(programs: Programs, step_tokens: int) -> None:
    """Refuses sizes for which there is no room, and tells of those that only XLA's slower attention does.

    `step_tokens` is the most of a step.
    """
    if is_hopper():
        from hex_llm.kernels.paged_attention.gpu_decode_sizes import refusal as hopper_refusal

        _tell_if_slow(hopper_refusal(*_shapes(programs), *_dtypes(programs)), "Hopper GPUs")
    if backend() == "cpu" and programs.dtype == jnp.float8_e4m3fn:
        logger.warning(
            "--kv_cache_dtype=fp8 is slow on CPUs: XLA makes wider numbers of a layer's whole cache, and fp8 of those"
            " again, in every step. int8 is not, and takes as little but for its scales."
        )
    if backend() != "tpu":
        return
    # Pallas takes a second to import, which a start on other devices has better use for.
    from hex_llm.kernels.paged_attention.tpu_sizes import (
        LANES,
        LARGEST_BLOCK_BYTES,
        LONGEST_STEP,
        LONGEST_TABLE,
        refusal,
        token_bytes,
    )

    arch, shapes, split = programs.arch, programs.shapes, Split.over(programs.arch, programs.mesh)
    if shapes.table_width > LONGEST_TABLE:
        raise ConfigError(
            f"--max_model_len={shapes.max_model_len} is {shapes.table_width} blocks of --block_size="
            f"{shapes.page_size} tokens, but a TPU's scalar memory holds the numbers of {LONGEST_TABLE}: "
            f"--max_model_len={LONGEST_TABLE * shapes.page_size} would fit, and so might larger blocks."
        )
    if step_tokens > LONGEST_STEP:
        raise ConfigError(
            f"--max_num_batched_tokens makes steps of {step_tokens} tokens, but a TPU's scalar memory holds the places"
            f" of {LONGEST_STEP}."
        )
    if (size := LANES * token_bytes(split.kv_heads, arch.head_dim, programs.dtype)) > LARGEST_BLOCK_BYTES:
        raise ConfigError(
            f"--tensor_parallel_size={split.num_devices} leaves each device {split.kv_heads} heads of keys and values, "
            f"{size} bytes for {LANES} tokens, but a TPU's vector memory holds {LARGEST_BLOCK_BYTES}: more devices "
            "would fit."
        )
    _tell_if_slow(refusal(*_shapes(programs), shapes.table_width, *_dtypes(programs)), "TPUs")


def _shapes(programs: Programs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of queries and of pages, on a device."""
    arch, split = programs.arch, Split.over(programs.arch, programs.mesh)
    pages = (1, 2, split.kv_heads, programs.shapes.page_size, page_width(arch.head_dim))
    return (1, split.heads, arch.head_dim), pages


def _dtypes(programs: Programs) -> tuple[Any, Any]:
    return programs.params.embed.dtype, programs.dtype


def _tell_if_slow(reason: str | None, devices: str) -> None:
    if reason is not None:
        logger.warning("Attention will be slow, by XLA and not by a kernel for %s: %s.", devices, reason)


def check_products(programs: Programs) -> None:
    """Tells of weights in few bits that no kernel takes: XLA makes 16 bits of them in every step."""
    if backend() == "cpu":
        return
    slow: dict[tuple[int, ...], str] = {}
    leaves = jax.tree_util.tree_leaves_with_path(programs.params, is_leaf=lambda leaf: isinstance(leaf, Packed))
    for path, weight in leaves:
        if isinstance(weight, Packed) and weight.layout == "plain" and not multiplied_as_it_lies(weight):
            slow.setdefault(weight.shape, jax.tree_util.keystr(path))
    if slow:
        shown = ", ".join(f"{name} {list(shape)}" for shape, name in slow.items())
        logger.warning(
            "Products with weights in few bits will be slow, by XLA and not by a kernel, for %s: on Hopper GPUs kernels"
            " take multiples of 64 rows and 128 columns, on TPUs of 128 and 64, groups of 32 columns or more, and"
            " bfloat16; on other GPUs there are none.",
            shown,
        )
