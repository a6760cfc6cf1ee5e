"""Pallas' GPU simulator, with products that run beside the warpgroup that asked for them, as those of wgmma do.

The simulator's own wgmma is done at once and without a look at its operands' clocks, so that it takes no part in races.
Here a product is one more asynchronous task, as the simulator's copies are: it reads its operands in shared memory at
a time of its own, which lies before what a warpgroup does once it has waited for the product, and before nothing else.
So a race is seen where shared memory is written to before the product that reads it has been waited for, where it is
read before a copy to it has ended, and where what a warpgroup itself has written is read without `commit_smem`. An
accumulator that is used while a product is added to it is an error. Blocks run one after the other, but count as
unordered: what one writes and another touches is a race, too, unless the one has given word of it and the other taken
word (`gpu_handover`; whose word it is makes no difference here).

What a warpgroup reads of global memory before it has waited for the kernel in front is kept, for tests to look at.

What is not seen: a left operand in registers that changes while a product still reads it; whether the warps of one
warpgroup keep in step; and what the blocks of a cluster write to each other's memory: here each copies all for itself.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax._src import callback, effects
from jax._src.pallas.mosaic_gpu import core, primitives
from jax._src.pallas.mosaic_gpu.interpret import (
    gpu_callbacks,
    jaxpr_interpret,
    race_detection_state,
    shared_memory,
)
from jax._src.state.primitives import ref_swap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.paged_attention import gpu_decode_narrow, gpu_scales
from hex_llm.kernels.quant_matmul import gpu_handover
from tests.kernels import narrow

BLOCKS, TASKS = 256, 1000  # of a kernel and of a block, with clocks of their own; where two share one, a race can hide
OF_PRODUCTS = 1 << 20  # with this, a wait for copies is one for products: the simulator leaves out `wgmma_wait`
OF_THE_KERNEL_IN_FRONT = 1 << 21  # and with this, one for the end of that
GIVING, TAKING = 1 << 22, 1 << 23  # and with these, none, but word between blocks
EVERYTHING = (slice(None), slice(None))
GLOBAL = shared_memory.get_memory_space_idx(plgpu.GMEM)


class Product(NamedTuple):
    """One that is under way."""

    accumulator: Any
    clock: Any


class Memory(shared_memory.GPUSharedMemory):
    """What the simulator knows of a kernel, and the products under way in each warpgroup, oldest first."""

    early_reads: list[Any]  # set by `simulation`
    words: collections.Counter[str]  # likewise: how many were given and taken

    def __init__(self, **options: Any) -> None:
        self.accumulators = itertools.count(-100, -1)
        self.next_block = 0
        self.given = []  # clocks of the warpgroups that gave word, in any block
        super().__init__(**options)

    def reset_per_cluster_state(self) -> None:
        """Begins a block. It runs after the one before, but is not to be taken for ordered after it."""
        super().reset_per_cluster_state()
        for clock in self.clocks.values():
            clock.inc(len(self.all_concurrent_threads) + self.next_block % BLOCKS)
        self.next_block += 1
        self.next_tma_thread_id = BLOCKS
        self.products = collections.defaultdict(collections.deque)
        self.behind = set()  # warpgroups that have waited for the kernel in front

    def get_next_wgmma_accumulator_id(self, thread: Any) -> int:
        """One that no block before has had: its clocks do not go on in the next, which would look like races."""
        return next(self.accumulators)

    def start_product(self, thread: Any, accumulator: Any) -> Any:
        """The clock of a new product."""
        clock = self.incr_clock(thread)
        clock.inc(self.get_next_tma_thread_id())
        self.products[thread].append(Product(accumulator, clock))
        return clock

    def wait_for_products(self, thread: Any, left: int) -> None:
        while len(self.products[thread]) > left:
            done = self.products[thread].popleft()
            with self.lock:
                self.clocks[thread].update(done.clock)
        self.incr_clock(thread)

    def wait_smem_to_gmem(self, thread: Any, n: Any, wait_read_only: bool) -> None:
        n = int(n)  # it comes as an array: XLA, asked to compare it, can wait for the very threads that wait here
        if n == OF_THE_KERNEL_IN_FRONT:
            self.behind.add(thread)
        elif n == GIVING:
            self.words["given"] += 1
            self.given.append(self.incr_clock(thread))
        elif n == TAKING:
            self.words["taken"] += 1
            assert self.given, "word is waited for that nobody gave"
            with self.lock:
                for clock in self.given:
                    self.clocks[thread].update(clock)
        elif n >= OF_PRODUCTS:
            self.wait_for_products(thread, n - OF_PRODUCTS)
        else:
            super().wait_smem_to_gmem(thread, n, wait_read_only)

    def assert_done(self, thread: Any, accumulator: Any) -> None:
        if any(product.accumulator == accumulator for product in self.products[thread]):
            raise AssertionError("an accumulator is used while a product is added to it")

    def get_buffer_content(self, key: Any, access: Any, thread: Any, **options: Any) -> Any:
        result = super().get_buffer_content(key, access, thread, **options)
        if key.memory_space_id == GLOBAL and thread is not None and thread not in self.behind:
            self.early_reads.append(result[0])
        return result

    def swap_buffer_content(self, key: Any, access: Any, value: Any, mask: Any, thread: Any, **options: Any) -> Any:
        self.assert_done(thread, key)
        return super().swap_buffer_content(key, access, value, mask, thread, **options)

    def kernel_thread_finished(self, thread: Any) -> None:
        super().kernel_thread_finished(thread)
        assert not self.products[thread], "a warpgroup ends before its products"


def wgmma(
    *, token, mesh_location, thread, acc_allocation_key_as_array, acc_transforms, a_allocation_key_as_array,
    a_transforms, b_allocation_key_as_array, b_transforms, source_info=None,
):  # fmt: skip
    """Starts a product. Unlike the simulator's, it takes the left side also from registers."""
    memory: Any = gpu_callbacks._get_shared_memory()
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    key_type = shared_memory.HostAllocationKey

    def place(key, transforms):
        key = key_type.from_array(key)
        return key, memory.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))

    def content(where):
        found = np.asarray(memory.get_buffer_content(*where, None, logging_info=info)[0])
        # In float64, so that a row's sums are the same wherever it stands: the order of a CPU depends on that.
        return found.astype(np.int32 if np.issubdtype(found.dtype, np.integer) else np.float64)

    def shared(where):
        gpu_callbacks.get_races().check_read(thread, clock.async_smem_clock, *where, source_info=source_info)
        return content(where)

    total = place(acc_allocation_key_as_array, acc_transforms)
    clock = memory.start_product(thread, total[0])
    left = a_allocation_key_as_array
    in_memory = left.shape == key_type.shape_and_dtype().shape
    a = shared(place(left, a_transforms)) if in_memory else np.asarray(left).astype(np.float64)
    b = shared(place(b_allocation_key_as_array, b_transforms))
    with np.errstate(invalid="ignore", over="ignore"):
        result = content(total) + a @ b
        result = result.astype(np.int32 if np.issubdtype(result.dtype, np.integer) else np.float32)  # as it is kept
    memory.store_buffer_content(*total, result, None, increment_clock=False, logging_info=info)
    return token


def load_accumulator(*, token, mesh_location, thread, acc_allocation_key_as_array, wait_n, source_info=None):
    """Waits for all products but the last `wait_n`, and reads one's sum."""
    memory: Any = gpu_callbacks._get_shared_memory()
    key = shared_memory.HostAllocationKey.from_array(acc_allocation_key_as_array)
    if wait_n is not None:
        memory.wait_for_products(thread, int(wait_n))
    memory.assert_done(thread, key)
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    return token, memory.get_buffer_content(key, memory.access(key, ()), None, logging_info=info)[0]


def interpret_store(self, eqn, token, value, target, barrier, block, *transforms, **options):
    """`async_store_smem`, which the simulator does not have: a store to the memory of a block of the same cluster."""
    kinds = [eqn.params[name] for name in ("ref_transforms_treedef", "barrier_transforms_treedef")]
    transforms, of_barrier = transforms[: kinds[0].num_leaves], transforms[kinds[0].num_leaves :]
    target, transforms = jaxpr_interpret.resolve_ref(
        eqn.invars[1].aval, target, jax.tree.unflatten(kinds[0], transforms)
    )
    barrier = jaxpr_interpret._get_barrier_allocation_key_from_inval(barrier, kinds[1], of_barrier)
    shape = gpu_callbacks.TOKEN_SHAPE_DTYPE
    call = functools.partial(store_to_block, source_info=eqn.source_info)
    found = callback.io_callback(
        call, shape, token, self.mesh_location, self.thread, value, target, transforms, barrier, block
    )
    return found, []


@gpu_callbacks.fail_on_exception
def store_to_block(token, mesh_location, thread, value, target, transforms, barrier, block, source_info=None):
    """Seen by whoever has waited for the barrier, which is the other block's, too."""
    memory: Any = gpu_callbacks._get_shared_memory()

    def there(key: Any) -> Any:
        return dataclasses.replace(shared_memory.HostAllocationKey.from_array(key), block_id=int(block))

    key = there(target)
    access = memory.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))
    clock = memory.incr_clock(thread)
    clock.inc(memory.get_next_tma_thread_id())
    gpu_callbacks.get_races().check_write(thread, clock.async_smem_clock.copy(), key, access, source_info=source_info)
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    memory.store_buffer_content(key, access, np.asarray(value), None, increment_clock=False, logging_info=info)
    memory.get_barrier(there(barrier)).arrive(thread, clock)
    return token


def run_state(function: Callable[[Any], None]) -> Callable[[Any], Any]:
    """`pl.run_state` of an accumulator, which the simulator does not have."""

    def run(accumulator: Any) -> Any:
        def body(ref: Any) -> Any:
            ref[...] = accumulator._init
            function(ref)
            return ref[...]

        return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef(accumulator.shape, accumulator.dtype))

    return run


def leave(place: Any, word: Any, sums: list[Any]) -> None:
    """`gpu_handover.leave`."""
    del word
    for i, each in enumerate(sums):
        place[i] = each
    plgpu.wait_smem_to_gmem(GIVING)


def add(place: Any, word: Any, sums: list[Any]) -> list[Any]:
    """`gpu_handover.add`."""
    del word
    plgpu.wait_smem_to_gmem(TAKING)
    return [each + place[i] for i, each in enumerate(sums)]


def call_with_numbers(function: Any, *arguments: Any) -> list[Any]:
    """What a kernel calls gets arrays of numpy's: with JAX's own, to look into one is a computation, for which XLA can
    want the very threads that wait for it, and everybody waits for ever."""
    positional, named = jax.tree.unflatten(function.in_tree, [np.asarray(each) for each in arguments])
    return jax.tree.leaves(function.callback_func(*positional, **named))


def number(x: Any) -> Any:
    """What stands for a place: a number, but while a kernel is traced."""
    return x if isinstance(x, jax.core.Tracer) else int(x)


def deallocate(barrier: Any) -> None:
    """The simulator wants every phase of a barrier to be waited for; the last ones concern nobody."""
    barrier.ref_count -= 1


@contextlib.contextmanager
def simulation(*, all_phases: bool = False) -> Iterator[list[Any]]:
    """Runs all kernels in the simulator; fails if that sees a race, or with `all_phases` a barrier left alone.

    Gives a list of what is read before a kernel has waited for the one in front.
    """
    kernels, early_reads, words = [], [], collections.Counter()

    def races(**options: Any) -> Any:
        kernels.append(race_detection_state.GPURaceDetectionState(**options))
        return kernels[-1]

    for allowed in (effects.lowerable_effects, effects.control_flow_allowed_effects):
        allowed.add_type(type(core._wgmma_pipeline_effect))
    parameters = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=BLOCKS + TASKS)
    with pytest.MonkeyPatch.context() as patch, plgpu.force_gpu_interpret_mode(parameters):
        patch.setattr(Memory, "early_reads", early_reads, raising=False)
        patch.setattr(Memory, "words", words, raising=False)
        patch.setattr(plgpu, "griddepcontrol_wait", lambda: plgpu.wait_smem_to_gmem(OF_THE_KERNEL_IN_FRONT))
        patch.setattr(plgpu, "griddepcontrol_launch_dependents", lambda: None)  # it has no kernels that overlap
        patch.setattr(plgpu, "wgmma_wait", lambda n: plgpu.wait_smem_to_gmem(OF_PRODUCTS + n))
        patch.setattr(gpu_handover, "leave", leave)
        patch.setattr(gpu_handover, "add", add)
        patch.setattr(pl, "run_state", run_state)
        patch.setattr(callback._FlatCallback, "__call__", call_with_numbers)
        patch.setattr(shared_memory, "_to_int", number)
        for name in ("load_keys", "load_values", "keys", "values", "turned_back"):  # it has no inlined instructions
            patch.setattr(gpu_decode_narrow, name, getattr(narrow, name))
        patch.setattr(gpu_scales, "load", narrow.load_scales)
        patch.setattr(
            primitives, "wgmma_accumulator_store", lambda accumulator, value: ref_swap(accumulator, EVERYTHING, value)
        )
        # The simulator chooses by these: it takes one for the other, which none of our kernels has.
        patch.setattr(primitives, "async_store_tmem_p", primitives.async_store_smem_p)
        patch.setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_async_store_tmem_p", interpret_store)
        patch.setattr(shared_memory, "GPUSharedMemory", Memory)
        patch.setattr(gpu_callbacks, "GPURaceDetectionState", races)
        patch.setattr(gpu_callbacks, "wgmma", gpu_callbacks.fail_on_exception(wgmma))
        patch.setattr(gpu_callbacks, "wgmma_accumulator_deref", gpu_callbacks.fail_on_exception(load_accumulator))
        if not all_phases:
            patch.setattr(shared_memory.Barrier, "deallocate", deallocate)
        gpu_callbacks.reset_gpu_interpret_mode_state()  # which a kernel that failed leaves behind
        jax.clear_caches()
        try:
            yield early_reads
        finally:
            jax.clear_caches()
    assert kernels, "no kernel ran in the simulator"
    assert words["given"] == words["taken"], f"not every word that was given was taken: {words}"
    assert not any(each.races_found for each in kernels), "the simulator saw a race, and printed it"
