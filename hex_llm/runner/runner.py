"""The door to the device: steps in, tokens out."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hex_llm.engine.step import Logprobs, Slice, StepResult
from hex_llm.runner.buckets import Buckets
from hex_llm.runner.compiler import Compiler
from hex_llm.runner.pack import Packer, wants_prompt_logprobs
from hex_llm.runner.state import empty_state, needs_full, pack_admission
from hex_llm.runner.step import StepOutput


class DeviceRunner:
    """Runs steps in the order they come. The KV cache and the state of the slots live on the device, and each step
    takes them over from the one before (they are donated), so that nothing is copied."""

    def __init__(self, params: Any, buckets: Buckets, compiler: Compiler):
        self._params = params
        self._shapes = compiler.shapes
        self._compiler = compiler
        self._packer = Packer(compiler.shapes, buckets)
        self._kv: tuple[Array, ...] = tuple(jnp.zeros(page.shape, page.dtype) for page in compiler.arguments.kv)
        self._state = jax.jit(partial(empty_state, compiler.shapes))()

    def dispatch(self, step: Sequence[Slice]) -> "PendingOutput":
        for piece in step:
            if piece.fresh and needs_full(piece.request):
                self._state = self._compiler.admit()(self._state, pack_admission(piece.request, self._shapes))
        bucket, blob = self._packer.pack(step)
        run = self._compiler.step(bucket)
        self._kv, self._state, output = run(self._params, self._kv, self._state, blob)
        return PendingOutput(step, output)


class PendingOutput:
    """A step's output on its way to the host."""

    def __init__(self, step: Sequence[Slice], output: StepOutput):
        jax.tree.map(lambda array: array.copy_to_host_async(), output)
        self._output = output
        self._step = step

    def read(self) -> StepResult:
        tokens = np.asarray(self._output.tokens)[: len(self._step)]
        logprobs = prompt_logprobs = None
        if self._output.logprobs is not None:
            logprobs = _unpack(np.asarray(self._output.logprobs)[: len(self._step)])
        if self._output.prompt_logprobs is not None:
            packed = np.asarray(self._output.prompt_logprobs)
            ends = np.cumsum([piece.length for piece in self._step])  # where each slice's tokens end in the batch
            prompt_logprobs = [
                _unpack(packed[end - piece.length : end]) if wants_prompt_logprobs(piece) else None
                for piece, end in zip(self._step, ends, strict=True)
            ]
        return StepResult(tokens, tokens >= 0, logprobs, prompt_logprobs)


def _unpack(packed: np.ndarray) -> Logprobs:
    """The host's side of `step.pack_logprobs`."""
    floats, count = packed.view(np.float32), packed.shape[1] // 2 - 1
    return Logprobs(own=floats[:, 0], rank=packed[:, 1], top_ids=packed[:, 2 : 2 + count], top=floats[:, 2 + count :])
