import jax
import jax.numpy as jnp
import pytest
from jax._src import effects  # the simulator forgets to allow what the kernels may do
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

from hex_llm.kernels.paged_attention import gpu_decode


@pytest.fixture
def simulator(monkeypatch, capfd):
    """Runs kernels in Pallas' GPU simulator; fails if that saw a race."""

    def add_product(values, weights, kv_ref, slot):  # the simulator's wgmma does not take weights from registers
        tile = kv_ref[slot, 1].astype(jnp.float32)
        plgpu.commit_smem()
        return values + jnp.dot(weights.astype(jnp.float32), tile)

    def deallocate(barrier):  # it wants every phase of a barrier to be waited for; the last ones concern nobody
        barrier.ref_count -= 1

    for name in ("griddepcontrol_wait", "griddepcontrol_launch_dependents"):  # it has no kernels that overlap
        monkeypatch.setattr(plgpu, name, lambda: None)
    monkeypatch.setattr(gpu_decode, "add_product", add_product)
    monkeypatch.setattr(shared_memory.Barrier, "deallocate", deallocate)
    effects.lowerable_effects.add_type(core._WGMMAPipelineEffect)
    jax.clear_caches()
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    jax.clear_caches()
    assert "RACE DETECTED" not in capfd.readouterr().out
