"""The figures of `h200.py`: what each must reach, what we want, and the table that says how it came out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.h200_settings import TENSORRT_LLM_FP8


@dataclass(frozen=True, slots=True)
class Figure:
    """One row. Without `must` there is nothing to reach."""

    name: str  # by which parts record it
    text: str
    must: float | None = None
    goal: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    digits: int = 3
    part: str = ""  # that measures it

    def judge(self, value: float | None) -> str:
        if value is None:
            return "missing"
        if self.must is None:
            return ""
        if self._reaches(value, self.must):
            return "goal" if self.goal is not None and self._reaches(value, self.goal) else "ok"
        return "SHORT"

    def _reaches(self, value: float, limit: float) -> bool:
        return value >= limit if self.sense == "at least" else value <= limit


def _most(name: str, text: str, must: float, goal: float | None = None, *, part: str, digits: int = 3) -> Figure:
    return Figure(name, text, must, goal, "at most", digits, part)


FIGURES = (
    Figure("serve64", "bench serve 1000/1000, 64 clients, output tok/s", 6500, 7500, digits=0, part="serve"),
    Figure("serve128", "bench serve 1000/1000, 128 clients, output tok/s", 8300, 9600, digits=0, part="serve"),
    _most("ttft64", "median TTFT at 64 clients, ms", 300, 200, part="serve", digits=0),
    _most("itl64", "p99 ITL over median ITL at 64 clients", 3, 2, part="serve", digits=2),
    Figure("itl128", "p99 ITL over median ITL at 128 clients", digits=2, part="serve"),
    Figure("events64", "events of a stream per token at 64 clients", digits=2, part="serve"),
    _most("cold", "cold start to ready, s", 120, part="serve", digits=1),
    _most("warm", "warm start to ready, s", 45, part="serve", digits=1),
    _most("step64", "decode step B=64, context 1500, ms", 8.1, 7.0, part="step", digits=2),
    _most("step128", "decode step B=128, context 1500, ms", 11.7, 10.2, part="step", digits=2),
    _most("step1", "decode step B=1, context 1500, ms", 4.3, 3.7, part="step", digits=2),
    Figure("python64", "Python per step at B=64, ms", digits=2, part="step"),
    _most("idle64", "device idle share in steady decode at B=64", 0.03, 0.01, part="step"),
    _most("sampling", "sampling's share of a step at B=64, greedy", 0.03, part="step"),
    _most("sampling_drawn", "the same, temperature", 0.03, part="step"),
    _most("sampling_filtered", "the same, temperature and top_p", 0.03, part="step"),
    Figure("prefill8k", "prefill of one 8k prompt, share of 790 TFLOP/s", 0.75, 0.8, part="prefill"),
    _most("prefix32k", "TTFT of a 32k prompt, cached over uncached", 0.05, 0.03, part="prefill"),
    Figure("copy", "device-to-device copy, TB/s", digits=2, part="kernel"),
    Figure("kernel_b64", "attention B=64 at 1500, share of 4.29 TB/s", 0.88, 0.94, part="kernel"),
    Figure("kernel_b128", "attention B=128 at 1500", 0.88, 0.94, part="kernel"),
    Figure("kernel_ragged", "attention B=64, contexts 1..4000", 0.82, 0.90, part="kernel"),
    Figure("kernel_b8", "attention B=8 at 1500", 0.63, 0.80, part="kernel"),
    Figure("kernel_b1", "attention B=1 at 1500", part="kernel"),
    _most("kernel_error", "attention kernels' largest difference to reference.py", 0.02, part="checks", digits=5),
    Figure("peer_decode", "transformers' continuous batching, decode tok/s at 64", digits=0, part="peer"),
    Figure("over_transformers", "our decode at 64 over transformers'", 15, 18, digits=1, part="peer"),
    Figure("under_load_mini", "greedy under load equal to alone, hex-mini", 1.0, part="parity"),
    Figure("under_load_8b", "greedy under load equal to alone, this shape", 1.0, part="parity"),
    _most("logprobs_bf16", "largest difference of log-probabilities, bf16 to float32", 0.5, part="parity"),
    _most("logprobs_bf16_mean", "mean difference of them, over transformers' own in bf16", 1.25, part="parity"),
    _most("logprobs_f32", "largest difference of log-probabilities in float32", 0.02, part="parity", digits=5),
    Figure("top1_bf16", "top-1 agreement with transformers' float32, bf16", 0.97, part="parity"),
    *(
        Figure(f"offline_{i}_{o}", f"offline {i}/{o}, output tok/s (TensorRT-LLM FP8 {n:,})", digits=0, part="offline")
        for (i, o), n in TENSORRT_LLM_FP8.items()
    ),
)


def derived(values: Mapping[str, float]) -> dict[str, float]:
    """Figures that two parts make together."""
    if "step64" in values and values.get("peer_decode"):
        return {"over_transformers": 64 / (values["step64"] / 1000) / values["peer_decode"]}
    return {}


def rows(values: Mapping[str, float], parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One for each figure that was measured, or whose part was to measure it."""
    found = []
    for figure in FIGURES:
        value = values.get(figure.name)
        if value is None and (figure.part not in parts or figure.must is None):
            continue
        found.append(
            {
                "figure": figure.name,
                "text": figure.text,
                "measured": value,
                "must": figure.must,
                "goal": figure.goal,
                "sense": figure.sense,
                "verdict": figure.judge(value),
            }
        )
    return found


def table(values: Mapping[str, float], parts: Mapping[str, Any]) -> str:
    """All rows, and how parts ended that were not done."""
    lines = [f"{'figure':<62} {'measured':>10} {'must':>9} {'goal':>9}  ok"]
    by_name = {figure.name: figure for figure in FIGURES}
    for row in rows(values, parts):
        digits = by_name[row["figure"]].digits
        numbers = [_number(row[name], digits) for name in ("measured", "must", "goal")]
        lines.append(f"{row['text']:<62} {numbers[0]:>10} {numbers[1]:>9} {numbers[2]:>9}  {row['verdict']}")
    for name, part in parts.items():
        if part["status"] != "done":
            lines.append(f"{name}: {part['status']}")
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
