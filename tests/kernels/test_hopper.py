from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from hex_llm.kernels import hopper
from hex_llm.kernels.chain import chained, whole
from hex_llm.kernels.paged_attention import api, xla


@pytest.mark.parametrize(
    ("backend", "capability", "expected"),
    [("gpu", "9.0", True), ("gpu", "8.0", False), ("gpu", "10.0", False), ("cpu", None, False), ("tpu", None, False)],
)
def test_only_hopper_gpus_run_our_kernels(monkeypatch, backend, capability, expected):
    device = SimpleNamespace(platform=backend, core_count=114)
    if capability is not None:
        device.compute_capability = capability
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert hopper.is_hopper() is expected
    assert chained(8) is expected
    assert api._best() == ("gpu" if expected else "tpu" if backend == "tpu" else "xla")
    assert hopper.num_sms() == (114 if backend == "gpu" else hopper.SMS)
    if api._best() == "xla":
        assert api._implementation(api._best()) is xla.attend


def test_a_chain_is_whole_where_every_kernel_does_its_part(monkeypatch):
    monkeypatch.setattr(hopper.jax, "default_backend", lambda: "gpu")

    def is_whole(tokens=128, dtype=jnp.bfloat16, embed=4096, mlp=14336, head_dim=128, page=32):
        q = jax.ShapeDtypeStruct((tokens, 32, head_dim), dtype)
        return whole(q, jax.ShapeDtypeStruct((9, 2, 8, page, head_dim), dtype), embed=embed, mlp=mlp)

    assert is_whole()
    assert is_whole(head_dim=96)
    others = [{"tokens": 129}, {"dtype": jnp.float32}, {"embed": 4160}, {"mlp": 14350}, {"page": 12}]
    for other in (*others, *({"head_dim": size} for size in (100, 192))):
        assert not is_whole(**other)
