"""What we tell XLA beside the programs. docs/performance.md has the measurements behind it."""

import math
import os

import jax

from hex_llm.kernels import chain
from hex_llm.kernels.quant_matmul.rows import TYPES
from hex_llm.kernels.quant_matmul.weight import Packed, bits
from hex_llm.parallel.backend import backend
from hex_llm.runner.programs import Forward, Program, Programs

# Of a GPU's memory. JAX's own choice is 0.75; the rest is for CUDA itself, its libraries and its graphs.
GPU_MEMORY = "0.93"
EIGHT_BITS_COLUMNS = 128  # of weights in rows and columns that a chain takes, multiples of it
# The device reads a layer's weights of so many bytes in less time than the host takes to launch its kernels one by one.
SHORT_LAYER = 256 * 2**20
FEW_TOKENS = 16  # with which the rest of a layer is short, too


def prepare_environment() -> None:
    """To be called before JAX looks for devices. What the user has set stays."""
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its former name, and JAX refuses to be given both
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", GPU_MEMORY)


def compiler_options(programs: Programs, program: Program) -> dict[str, bool | int | str] | None:
    if backend() != "gpu":
        return None
    # A profile shall show what runs without one.
    options: dict[str, bool | int | str] = {"xla_enable_command_buffers_during_profiling": True}
    if isinstance(program, Forward):
        tokens = program.bucket.tokens
        # With a few rows Triton's matmuls are the faster ones, with more of them cuBLAS's.
        options["xla_gpu_enable_triton_gemm"] = tokens < 16
        if _is_chain(programs, tokens) and not _waits_for_host(programs, tokens):
            # In a graph no kernel of the chain could begin ahead of the end of the one in front.
            options["xla_gpu_enable_command_buffer"] = ""
    return options


def _is_chain(programs: Programs, tokens: int) -> bool:
    arch = programs.arch
    if programs.is_split or arch.o_bias or arch.mlp_bias or arch.num_experts:
        return False
    weights = jax.tree.leaves(programs.params.layers, is_leaf=lambda leaf: isinstance(leaf, Packed))
    if not all(_in_chain(each) for each in weights if isinstance(each, Packed)):
        return False
    q = jax.ShapeDtypeStruct((tokens, arch.num_heads, arch.head_dim), programs.params.embed.dtype)
    return chain.whole(q, programs.kv[0], embed=arch.embed_size, mlp=arch.mlp_size)


def _waits_for_host(programs: Programs, tokens: int) -> bool:
    """Whether a layer is over before the host has launched its kernels, so that a graph of them is the faster way."""
    layers = programs.params.layers
    size = sum(math.prod(each.shape) * each.dtype.itemsize for each in jax.tree.leaves(layers))
    weights = jax.tree.leaves(layers, is_leaf=lambda leaf: isinstance(leaf, Packed))
    # Tokens in 8 bits take another kernel a layer. Not so with weights of 4 bits: blocks of such products may hand sums
    # over to each other, and in a graph nobody knows what runs beside them.
    in_8_bits = any(isinstance(each, Packed) and _in_8_bits(each) for each in weights)
    return size < SHORT_LAYER * programs.arch.num_layers and (tokens <= FEW_TOKENS or in_8_bits)


def _in_chain(weight: Packed) -> bool:
    if weight.layout in ("hopper", "hopper8"):
        return True
    return _in_8_bits(weight) and weight.shape[-1] % EIGHT_BITS_COLUMNS == 0


def _in_8_bits(weight: Packed) -> bool:
    """Like the tokens that it multiplies."""
    return weight.coding in TYPES and bits(weight.coding) == 8
