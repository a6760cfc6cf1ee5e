"""What we tell XLA beside the programs. docs/performance.md has the measurements behind it."""

import os

import jax

from hex_llm.kernels import chain
from hex_llm.kernels.quant_matmul.rows import TYPES
from hex_llm.kernels.quant_matmul.weight import Packed
from hex_llm.parallel.backend import backend
from hex_llm.runner.programs import Forward, Program, Programs

# Of a GPU's memory. JAX's own choice is 0.75; the rest is for CUDA itself, its libraries and its graphs.
GPU_MEMORY = "0.93"
EIGHT_BITS_COLUMNS = 128  # of weights in rows and columns that a chain takes, multiples of it


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
        # With a few rows Triton's matmuls are the faster ones, with more of them cuBLAS's.
        options["xla_gpu_enable_triton_gemm"] = program.bucket.tokens < 16
        if _is_chain(programs, program.bucket.tokens):
            # A graph would stand between two kernels of the chain, and the second could not begin ahead.
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


def _in_chain(weight: Packed) -> bool:
    return weight.layout == "hopper" or (weight.coding in TYPES and weight.shape[-1] % EIGHT_BITS_COLUMNS == 0)
