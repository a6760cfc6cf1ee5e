"""What the device did in a while, from a profiler's trace: which kernels, for how long, and when it had none."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

# What begins and ends a trace is left out: the profiler itself takes time then.
_SKIP_START, _SKIP_END = 0.2, 0.05
_COPIES = ("MemcpyH2D", "MemcpyD2H")  # between host and device: no work of the device's


@dataclass(frozen=True, slots=True)
class Kernel:
    """A piece of work of the device; `module` is the compiled program that it belongs to."""

    name: str
    module: str
    start_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What happened between two moments."""

    span_ns: float
    busy_ns: float  # when at least one kernel ran
    kernels: tuple[Kernel, ...]

    @property
    def idle_share(self) -> float:
        return 1 - self.busy_ns / self.span_ns

    def by(self, attribute: str) -> dict[str, tuple[int, float]]:
        """How often, and how many microseconds in all, by name or by module; the longest first."""
        totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for kernel in self.kernels:
            total = totals[getattr(kernel, attribute)]
            total[0] += 1
            total[1] += (kernel.end_ns - kernel.start_ns) / 1000
        ordered = sorted(totals.items(), key=lambda item: -item[1][1])
        return {name: (int(count), round(microseconds, 1)) for name, (count, microseconds) in ordered}

    def added(self) -> dict[str, float]:
        """By name, the microseconds from the end of whatever ended before a kernel to its own end: kernels overlap
        where one begins ahead of another."""
        totals: dict[str, float] = defaultdict(float)
        reached = min((each.start_ns for each in self.kernels), default=0.0)
        for kernel in sorted(self.kernels, key=lambda each: each.end_ns):
            totals[kernel.name] += (kernel.end_ns - reached) / 1000
            reached = kernel.end_ns
        return dict(totals)

    def share(self, words: Sequence[str]) -> float | None:
        """Of the time in which a kernel ran, that of programs with such a word in their name; None where there is none.

        Kernels that overlap count in full, so it is rather too much.
        """
        modules = self.by("module")
        chosen = [total for name, (_, total) in modules.items() if any(word in name for word in words)]
        return 1000 * sum(chosen) / self.busy_ns if chosen else None


@contextlib.contextmanager
def tracing(folder: Path) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow down what is measured
    options.host_tracer_level = 1
    options.enable_hlo_proto = False
    jax.profiler.start_trace(str(folder), profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def read_profile(folder: Path) -> Profile:
    """The middle of the latest trace in a folder."""
    path = max(folder.rglob("*.xplane.pb"), key=lambda each: each.stat().st_mtime)
    return profile(list(_kernels(ProfileData.from_file(str(path)))))


def middle(values: Sequence[float]) -> Sequence[float]:
    """Those of the steps that a profile looks at."""
    return values[int(_SKIP_START * len(values)) : len(values) - int(_SKIP_END * len(values))]


def profile(kernels: Sequence[Kernel]) -> Profile:
    assert kernels, "the trace has no kernels"
    first, last = min(each.start_ns for each in kernels), max(each.end_ns for each in kernels)
    start, end = first + _SKIP_START * (last - first), last - _SKIP_END * (last - first)
    inside = [each for each in kernels if each.end_ns > start and each.start_ns < end]
    busy, reached = 0.0, start
    for kernel in sorted(inside, key=lambda each: each.start_ns):
        begin, stop = max(kernel.start_ns, reached), min(kernel.end_ns, end)
        if stop > begin:
            busy += stop - begin
            reached = stop
    return Profile(end - start, busy, tuple(inside))


def _kernels(data: Any) -> Iterator[Kernel]:
    """From the streams of the first GPU; on a CPU, from its threads, whose events say so if they are of a program."""
    planes = {plane.name: plane for plane in data.planes}
    gpus = sorted(name for name in planes if name.startswith("/device:GPU"))
    plane = planes[gpus[0] if gpus else "/host:CPU"]
    lines = list(plane.lines)
    # Beside streams, there may be lines that tell the same once more, summed up.
    for line in [each for each in lines if gpus and each.name.startswith("Stream")] or lines:
        for event in line.events:
            stats = {str(name): value for name, value in event.stats if name}
            if not event.duration_ns or event.name.startswith(_COPIES) or not (gpus or "hlo_op" in stats):
                continue
            module = str(stats.get("hlo_module") or _graph(stats))
            yield Kernel(event.name, module, event.start_ns, event.start_ns + event.duration_ns)


def _graph(stats: dict[str, Any]) -> str:
    """A name for what was launched as a part of a CUDA graph and does not say of which program."""
    found = [f"{name} {value}" for name, value in stats.items() if "graph_id" in name.lower()]
    return found[0] if found else "unknown"
