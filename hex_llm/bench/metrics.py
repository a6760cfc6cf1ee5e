"""What the outcomes of a run amount to, by the definitions that vLLM's benchmark has made common."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hex_llm.bench.load import Outcome

# Of one request: to its first token, per token after that, between chunks, in all.
LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Counted:
    """A request that was answered, with its tokens counted."""

    outcome: Outcome
    input_tokens: int
    output_tokens: int

    def latency_ms(self, name: str) -> float:
        """ttft, tpot or e2el; the time per token after the first is 0 where there is no such token."""
        outcome = self.outcome
        first = outcome.latency_s if outcome.first_token_s is None else outcome.first_token_s
        if name == "ttft":
            return 1000 * first
        if name == "tpot":
            return 1000 * (outcome.latency_s - first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0
        return 1000 * outcome.latency_s


@dataclass(frozen=True, slots=True)
class Latency:
    """How one latency is distributed, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    completed: int
    failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    goodput: float | None  # requests per second that met every goal; None without goals
    peak_output_throughput: float  # tokens in the best second
    peak_concurrency: int  # requests that were under way at some time in the same second
    latencies: Mapping[str, Latency]

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration_s

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.duration_s


def summarize(
    answered: Sequence[Counted],
    *,
    failed: int,
    duration_s: float,
    latencies: Sequence[str],
    percentiles: Sequence[float],
    goals_ms: Mapping[str, float],
) -> Summary:
    tokens, running = _per_second(answered)
    met = sum(all(each.latency_ms(name) <= goal for name, goal in goals_ms.items()) for each in answered)
    return Summary(
        completed=len(answered),
        failed=failed,
        duration_s=duration_s,
        input_tokens=sum(each.input_tokens for each in answered),
        output_tokens=sum(each.output_tokens for each in answered),
        goodput=met / duration_s if goals_ms else None,
        peak_output_throughput=float(tokens.max(initial=0)),
        peak_concurrency=int(running.max(initial=0)),
        latencies={name: _latency(_values_ms(name, answered), percentiles) for name in latencies},
    )


def _values_ms(name: str, answered: Sequence[Counted]) -> list[float]:
    if name == "itl":
        return [1000 * gap for each in answered for gap in each.outcome.gaps_s]
    return [each.latency_ms(name) for each in answered if name != "tpot" or each.output_tokens > 1]


def _latency(values: Sequence[float], percentiles: Sequence[float]) -> Latency:
    values = values or [0.0]
    return Latency(
        mean=float(np.mean(values)),
        median=float(np.median(values)),
        std=float(np.std(values)),
        percentiles={each: float(np.percentile(values, each)) for each in percentiles},
    )


def _per_second(answered: Sequence[Counted]) -> tuple[np.ndarray, np.ndarray]:
    """Output tokens, and requests under way, in each second from the first start on.

    A chunk counts for its share of the answer's tokens: for one token, where every token has a chunk.
    """
    if not answered:
        return np.zeros(0), np.zeros(0)
    origin = min(each.outcome.start_s for each in answered)
    ends = [each.outcome.start_s + each.outcome.latency_s - origin for each in answered]
    tokens, running = np.zeros(int(max(ends)) + 1), np.zeros(int(max(ends)) + 1)
    for each, end in zip(answered, ends, strict=True):
        outcome = each.outcome
        start = outcome.start_s - origin
        first = outcome.latency_s if outcome.first_token_s is None else outcome.first_token_s
        times = start + first + np.cumsum([0.0, *outcome.gaps_s])
        # Sums of differences may end a hair after the end that they add up to.
        np.add.at(tokens, np.minimum(times.astype(int), len(tokens) - 1), each.output_tokens / len(times))
        running[int(start) : int(end) + 1] += 1
    return tokens, running
