"""The devices of this machine, as far as that can be told without JAX, and how a process is kept to some of them.

A process that imports JAX takes the devices it sees, so it has to be told before which ones those are.
"""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hex_llm.errors import ConfigError

type Platform = Literal["cpu", "cuda", "tpu"]

_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
# How chips lie beside each other, by their number. Others are no part of a host that a process could have alone.
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
# With several CPU devices the collectives of one step hold threads that others wait for: XLA's pool must be large.
_THREADS_PER_DEVICE, _LEAST_THREADS = 4, 16
_PLUGINS: dict[Platform, tuple[str, ...]] = {"tpu": ("libtpu",), "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
_NAMES: dict[str, Platform] = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}  # as JAX_PLATFORMS has them


@dataclass(frozen=True, slots=True)
class LocalDevices:
    """`names` are what the platform calls the devices that this process may use."""

    platform: Platform
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def environment(self, devices: Sequence[int] | None, environ: Mapping[str, str]) -> dict[str, str]:
        """What a process has to be started with to see these only, by number; None is all."""
        if self.platform == "cpu":
            return self._cpu_environment(devices, environ)
        if devices is None:
            return {}
        names = ",".join(self.names[index] for index in devices)
        if self.platform == "cuda":
            return {"CUDA_VISIBLE_DEVICES": names}
        if len(devices) not in _TPU_BOUNDS:
            raise ConfigError(
                f"--tensor_parallel_size={len(devices)} (or --decode_tensor_parallel_size): of the chips of a TPU host,"
                f" one of several engines can have {', '.join(map(str, _TPU_BOUNDS))}."
            )
        return {
            "TPU_VISIBLE_CHIPS": names,
            "TPU_CHIPS_PER_PROCESS_BOUNDS": _TPU_BOUNDS[len(devices)],
            "TPU_PROCESS_BOUNDS": "1,1,1",
        }

    def _cpu_environment(self, devices: Sequence[int] | None, environ: Mapping[str, str]) -> dict[str, str]:
        number = len(self.names if devices is None else devices)
        wanted = {} if devices is None else {"JAX_NUM_CPU_DEVICES": str(number)}
        threads = max(_THREADS_PER_DEVICE * number, _LEAST_THREADS)
        if number > 1:
            wanted |= {name: str(threads) for name in ("NPROC", "PJRT_NPROC") if _number(environ, name) < threads}
        return wanted


def local_devices(
    environ: Mapping[str, str], *, root: Path = Path("/"), has_module: Callable[[str], bool] | None = None
) -> LocalDevices:
    """What JAX will find: what JAX_PLATFORMS names first, else a TPU or GPUs with their plugin, else CPUs."""
    accelerators: dict[Platform, tuple[str, ...]] = {
        "tpu": _tpu_chips(environ, root / "dev"),
        "cuda": _gpus(environ, root / "dev"),
    }
    wanted = _wanted(environ)
    for platform, names in accelerators.items():
        there = names and any(map(has_module or _has_module, _PLUGINS[platform]))
        if platform == wanted or (wanted is None and there):
            return LocalDevices(platform, names)
    return LocalDevices("cpu", _cpus(environ))


def _wanted(environ: Mapping[str, str]) -> Platform | None:
    if not (platforms := environ.get("JAX_PLATFORMS", "")):
        return None
    first = platforms.split(",")[0].strip()
    if first not in _NAMES:
        raise ConfigError(
            f"JAX_PLATFORMS={platforms}: models can be split over devices, or copied to several, with cpu, cuda and tpu"
            f" only, not with {first}."
        )
    return _NAMES[first]


def _gpus(environ: Mapping[str, str], dev: Path) -> tuple[str, ...]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(map(str, range(len(_numbered(dev, "nvidia")))))
    names = [name.strip() for name in visible.split(",")]
    # CUDA stops reading at the first that is none.
    end = next((index for index, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return tuple(names[:end])


def _tpu_chips(environ: Mapping[str, str], dev: Path) -> tuple[str, ...]:
    for variable in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        if visible := environ.get(variable):
            return tuple(name.strip() for name in visible.split(","))
    return tuple(map(str, range(len(_numbered(dev, "accel") or _numbered(dev / "vfio", "")))))


def _cpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    number = _number(environ, "JAX_NUM_CPU_DEVICES")
    if number < 1:  # unset, or -1
        given = _COUNT_FLAG.findall(environ.get("XLA_FLAGS", ""))
        number = int(given[-1]) if given else 1
    return tuple(map(str, range(number)))


def _numbered(folder: Path, word: str) -> list[Path]:
    return [path for path in folder.glob(f"{word}[0-9]*") if path.name.removeprefix(word).isdecimal()]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else 0


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
