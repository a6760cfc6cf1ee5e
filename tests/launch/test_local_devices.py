"""The devices of a machine, as files, modules and variables tell of them."""

from pathlib import Path

import pytest

from hex_llm.errors import ConfigError
from hex_llm.launch.local_devices import LocalDevices, local_devices


def machine(tmp_path: Path, *names: str) -> Path:
    for name in names:
        path = tmp_path / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


def look(root: Path, modules: str = "", **environ: str) -> tuple[str, tuple[str, ...]]:
    found = local_devices(environ, root=root, has_module=lambda name: name in modules.split())
    return found.platform, found.names


GPUS = ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm")
CUDA = "jax_cuda13_plugin"


def test_a_machine_without_accelerators_has_one_cpu_device_unless_told_otherwise(tmp_path):
    assert look(tmp_path) == ("cpu", ("0",))
    assert look(tmp_path, JAX_NUM_CPU_DEVICES="3") == ("cpu", ("0", "1", "2"))
    flags = "--xla_foo=1 --xla_force_host_platform_device_count=4"
    assert look(tmp_path, XLA_FLAGS=flags) == ("cpu", ("0", "1", "2", "3"))
    assert look(tmp_path, XLA_FLAGS=flags, JAX_NUM_CPU_DEVICES="2") == ("cpu", ("0", "1"))
    assert look(tmp_path, XLA_FLAGS=flags, JAX_NUM_CPU_DEVICES="-1") == ("cpu", ("0", "1", "2", "3"))


def test_gpus_count_where_jax_has_the_plugin_for_them(tmp_path):
    root = machine(tmp_path, *GPUS)
    assert look(root) == ("cpu", ("0",))
    assert look(root, CUDA) == ("cuda", ("0", "1", "2"))
    assert look(root, CUDA, JAX_PLATFORMS="cpu") == ("cpu", ("0",))
    assert look(root, JAX_PLATFORMS="gpu,cpu") == ("cuda", ("0", "1", "2"))


@pytest.mark.parametrize(
    ("visible", "names"),
    [("2,0", ("2", "0")), ("GPU-8932f937", ("GPU-8932f937",)), ("1,-1,2", ("1",)), ("5, 6", ("5", "6"))],
)
def test_of_gpus_those_count_that_cuda_may_see(tmp_path, visible, names):
    assert look(machine(tmp_path, *GPUS), CUDA, CUDA_VISIBLE_DEVICES=visible) == ("cuda", names)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_where_cuda_may_see_no_gpu_jax_takes_the_cpu(tmp_path, visible):
    assert look(machine(tmp_path, *GPUS), CUDA, CUDA_VISIBLE_DEVICES=visible) == ("cpu", ("0",))


@pytest.mark.parametrize("names", [("accel0", "accel1", "accel2", "accel3"), ("vfio/0", "vfio/1", "vfio/2", "vfio/3")])
def test_tpu_chips_are_found_under_either_name(tmp_path, names):
    root = machine(tmp_path, *names, "vfio/vfio")
    assert look(root) == ("cpu", ("0",))
    assert look(root, "libtpu") == ("tpu", ("0", "1", "2", "3"))
    assert look(root, "libtpu", TPU_VISIBLE_CHIPS="2,3") == ("tpu", ("2", "3"))
    assert look(root, JAX_PLATFORMS="tpu") == ("tpu", ("0", "1", "2", "3"))


def test_libtpu_alone_makes_no_tpu(tmp_path):
    assert look(machine(tmp_path, "vfio/vfio"), "libtpu") == ("cpu", ("0",))


def test_a_platform_that_cannot_be_shared_out_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"JAX_PLATFORMS=rocm,cpu.*not with rocm"):
        look(tmp_path, JAX_PLATFORMS="rocm,cpu")


def test_a_process_sees_its_gpus_only_by_the_names_that_they_have():
    gpus = LocalDevices("cuda", ("4", "5", "6", "7"))
    assert gpus.environment((2, 3), {}) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert gpus.environment(None, {}) == {}


def test_a_process_sees_its_chips_only_and_how_they_lie():
    chips = LocalDevices("tpu", tuple("01234567"))
    assert chips.environment((4, 5, 6, 7), {}) == {
        "TPU_VISIBLE_CHIPS": "4,5,6,7",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    assert chips.environment((1,), {})["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    with pytest.raises(ConfigError, match=r"--tensor_parallel_size=3 .* 1, 2, 4, 8"):
        chips.environment((0, 1, 2), {})


def test_a_process_has_cpu_devices_of_its_own_and_threads_for_all_of_them():
    cpus = LocalDevices("cpu", tuple("01234567"))
    assert cpus.environment((3,), {}) == {"JAX_NUM_CPU_DEVICES": "1"}
    assert cpus.environment((0, 1), {}) == {"JAX_NUM_CPU_DEVICES": "2", "NPROC": "16", "PJRT_NPROC": "16"}
    assert cpus.environment(None, {}) == {"NPROC": "32", "PJRT_NPROC": "32"}
    assert cpus.environment(None, {"NPROC": "40", "PJRT_NPROC": "31"}) == {"PJRT_NPROC": "32"}
