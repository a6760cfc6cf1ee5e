"""What `hex-llm tune` turns: flags of the server, each with the values that are worth a try, in order."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from hex_llm.errors import ConfigError

type Value = int | float | bool | None  # None: what the server chooses


@dataclass(frozen=True, slots=True)
class Axis:
    flag: str
    values: tuple[Value, ...]


def axes_for(concurrency: int, fixed: Collection[str]) -> tuple[Axis, ...]:
    """Those of the flags that are not `fixed`, the ones first that change most."""
    seqs = tuple(1 << power for power in range(2, 11) if 1 << power <= 4 * concurrency)
    found = (
        Axis("enable_chunked_prefill", (False, True)),
        Axis("max_num_batched_tokens", (128, 256, 512, 1024, 2048, 4096, 8192)),
        Axis("max_decode_seqs", seqs),
        Axis("hbm_utilization_factor", (0.8, 0.9, 0.95)),
    )
    if "gpu_memory_utilization" in fixed:  # says the same in another way
        fixed = {*fixed, "hbm_utilization_factor"}
    left = tuple(axis for axis in found if axis.flag not in fixed)
    if not left:
        raise ConfigError(f"Nothing is left to tune: all of {', '.join(axis.flag for axis in found)} are given.")
    return left


@dataclass(frozen=True, slots=True)
class Setting:
    """A value for each of some flags."""

    values: tuple[tuple[str, Value], ...] = ()

    def with_(self, flag: str, value: Value) -> "Setting":
        return Setting(tuple(sorted((dict(self.values) | {flag: value}).items())))

    def of(self, flag: str) -> Value:
        return dict(self.values).get(flag)

    @property
    def flags(self) -> list[str]:
        """As the server takes them."""
        return [_flag(name, value) for name, value in self.values if value is not None]

    def __str__(self) -> str:
        return " ".join(self.flags) or "(as the server chooses)"


def start(concurrency: int, axes: Collection[Axis]) -> Setting:
    """Where to begin: what most loads want, and else what the server chooses."""
    setting = Setting()
    for axis in axes:
        if axis.flag == "enable_chunked_prefill":
            setting = setting.with_(axis.flag, value=True)
        elif axis.flag == "max_decode_seqs":
            enough = [value for value in axis.values if value is not None and value >= concurrency]
            setting = setting.with_(axis.flag, value=enough[0] if enough else axis.values[-1])
    return setting


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"
