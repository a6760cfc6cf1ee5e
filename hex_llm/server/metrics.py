"""What the server counts and times, for Prometheus. Names and meanings are vLLM's where it has them.

Counters and histograms belong to one HTTP process; where there are several, prometheus_client adds them up through
files. What only the engine knows is read from its last sign of life when somebody asks.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from hex_llm.engine.output import Output, Stats
from hex_llm.engine.router import Router

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "hexllm:"
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Metrics:
    """Every metric once. `model` is a label on those that vLLM labels with it; `roles` are what each engine is for,
    where they are of two kinds; `num_adapters` is how many the device of each has room for.
    """

    def __init__(self, model: str, roles: Sequence[str] = (), num_adapters: int = 0):
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self.model = model
        self._roles = roles if any(roles) else ()
        self._num_adapters = num_adapters
        self.num_prompt_tokens = self.num_generated_tokens = 0  # as the counters below, for the log
        self.received = self._counter("requests_received", "Requests that came in.", ("route",))
        self.requests = self._counter(
            "requests", "Requests that ended: completed, failed, cancelled or rejected.", ("route", "outcome")
        )
        self.responses = self._counter("http_responses", "Answers by status.", ("route", "code"))
        self.rejected = self._counter(
            "requests_rejected", "Requests that were refused, by the error's code.", ("reason",)
        )
        self.in_flight = Gauge(
            f"{PREFIX}requests_in_flight",
            "Requests that came in and have not ended.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.internal_errors = self._counter("internal_errors", "Answers that failed for a fault of ours.")
        self.stream_errors = self._counter("stream_errors", "Streams that ended with an error.")
        self.sent = self._counter("replica_requests", "Sequences that were sent to a replica.", ("replica",))
        self.replays = self._counter(
            "replays", "Times that a sequence began anew, its replica or its blocks being lost."
        )
        self.engine_deaths = self._counter(
            "engine_deaths", "Times that the last engine was lost, which ends the server.", ("reason",)
        )
        self.success = self._counter(
            "request_success", "Sequences that were completed.", ("model_name", "finished_reason")
        )
        self.lora_loads = self._counter(
            "lora_loads", "Adapters that were fetched and looked at: loaded, or the error's code.", ("result",)
        )
        self.nan_rows = self._counter("nan_rows", "Sequences that the model had no usable number for.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.", ("model_name",)).labels(model)
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers.", ("model_name",)).labels(model)
        self.cached_tokens = self._counter(
            "prompt_tokens_cached",
            "Tokens of prompts that usage told as cached, in units of --prefill_len_padding.",
            ("model_name",),
        ).labels(model)
        self.time_to_first_token = self._seconds(
            "time_to_first_token_seconds", "Seconds from a sequence's going to the engine to its first token."
        )
        self.inter_token = _Tally(
            self._seconds("inter_token_latency_seconds", "Seconds between two tokens of a sequence.")
        )
        self.per_output_token = self._seconds(
            "request_time_per_output_token_seconds", "Mean seconds between the tokens of a sequence."
        )
        self.end_to_end = self._seconds(
            "e2e_request_latency_seconds", "Seconds from a sequence's going to the engine to its last token."
        )
        self.queue_time = self._seconds(
            "request_queue_time_seconds", "Seconds that a sequence waits for the engine to begin with it."
        )
        self.prefill_time = self._seconds(
            "request_prefill_time_seconds", "Seconds from the engine's beginning to the first token."
        )
        self.decode_time = self._seconds("request_decode_time_seconds", "Seconds from the first token to the last.")
        self.prompt_lengths = self._sizes("request_prompt_tokens", "Tokens of a prompt.")
        self.answer_lengths = self._sizes("request_generation_tokens", "Tokens of an answer.")
        self.asked_n = self._sizes("request_params_n", "Answers asked for.")
        self.asked_tokens = self._sizes("request_params_max_tokens", "Most tokens asked for.")
        self.batch = self._sizes("batch_sequences", "Sequences of this process that a step brought tokens to.")

    def count_prompt(self, tokens: int) -> None:
        self.num_prompt_tokens += tokens
        self.prompt_tokens.inc(tokens)

    def count_step(self, outputs: Sequence[Output]) -> None:
        """What a step brought, counted at once: a step has many sequences."""
        tokens = sum(len(output.tokens) for output in outputs)
        self.num_generated_tokens += tokens
        self.generation_tokens.inc(tokens)
        self.batch.observe(len(outputs))

    def count_sent(self, replica: int, again: bool) -> None:
        self.sent.labels(str(replica)).inc()
        if again:
            self.replays.inc()

    def count_lora_load(self, result: str) -> None:
        self.lora_loads.labels(result).inc()

    def flush(self) -> None:
        """To be called now and then: other processes read what is flushed."""
        self.inter_token.flush()

    def render(self, engine: Router, gauges: Callable[[], Mapping[str, tuple[str, float]]]) -> bytes:
        """All metrics as text. `gauges` gives those of the front: a help text and a value by name."""
        self.flush()
        if folder := os.environ.get(FOLDER_VARIABLE):
            registry = CollectorRegistry()
            MultiProcessCollector(registry, folder)
        else:
            registry = self._registry
        now = CollectorRegistry()
        now.register(_Now(engine, gauges, self.model, self._roles, self._num_adapters))
        return generate_latest(registry) + generate_latest(now)

    def _counter(self, name: str, help: str, names: tuple[str, ...] = ()) -> Counter:
        return Counter(f"{PREFIX}{name}", help, names, registry=self._registry)

    def _seconds(self, name: str, help: str) -> Any:
        histogram = Histogram(f"{PREFIX}{name}", help, ("model_name",), registry=self._registry, buckets=_SECONDS)
        return histogram.labels(self.model)

    def _sizes(self, name: str, help: str) -> Any:
        histogram = Histogram(f"{PREFIX}{name}", help, ("model_name",), registry=self._registry, buckets=_COUNTS)
        return histogram.labels(self.model)


class _Tally:
    """A histogram for what happens with every token: added up here, and handed on now and then. `observe` of
    prometheus_client goes through all bounds in Python, under a lock for each number it keeps.
    """

    def __init__(self, histogram: Any):
        self._histogram = histogram
        self._bounds = list(_SECONDS)
        self._counts = [0] * (len(_SECONDS) + 1)  # the last is for what is beyond all bounds
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        for bucket, count in zip(self._histogram._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._histogram._sum.inc(self._sum)
        self._counts = [0] * len(self._counts)
        self._sum = 0.0


class _Now(Collector):
    """What is true at this moment."""

    def __init__(
        self,
        engine: Router,
        gauges: Callable[[], Mapping[str, tuple[str, float]]],
        model: str,
        roles: Sequence[str],
        num_adapters: int,
    ):
        self._engine = engine
        self._gauges = gauges
        self._model = model
        self._roles = roles
        self._num_adapters = num_adapters

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for name, (help, value) in self._gauges().items():
            yield GaugeMetricFamily(f"{PREFIX}{name}", help, value)
        yield CounterMetricFamily(
            f"{PREFIX}xla_compiles_after_ready", "Steps compiled while serving.", self._engine.late_compiles
        )
        yield CounterMetricFamily(
            f"{PREFIX}xla_compile_seconds_after_ready",
            "Seconds that compiling while serving took.",
            self._engine.late_compile_seconds,
        )
        yield CounterMetricFamily(
            f"{PREFIX}invariant_violations",
            "Times that blocks or slots of the idle engine did not add up.",
            self._engine.invariant_violations,
        )
        up = GaugeMetricFamily(f"{PREFIX}replica_up", "1 where a replica takes requests.", labels=("replica",))
        outstanding = GaugeMetricFamily(
            f"{PREFIX}replica_outstanding_tokens",
            "Tokens that a replica still has to compute for this process, as far as that can be known.",
            labels=("replica",),
        )
        restarts = CounterMetricFamily(
            f"{PREFIX}replica_restarts", "Times that a replica has come back.", labels=("replica",)
        )
        for each in self._engine.replicas:
            restarts.add_metric((str(each.index),), max(each.num_joined - 1, 0))
            up.add_metric((str(each.index),), each.is_up)
            outstanding.add_metric((str(each.index),), each.num_outstanding)
        yield restarts
        yield up
        yield outstanding
        if self._roles:
            yield self._kinds()
        if (stats := self._engine.stats) is not None:
            yield self._blocks(stats)
            if self._num_adapters:
                yield self._slots(stats)
            yield from self._of_model(GaugeMetricFamily, self._states(stats))
            yield from self._of_model(CounterMetricFamily, self._counts(stats))

    def _kinds(self) -> GaugeMetricFamily:
        roles = GaugeMetricFamily(f"{PREFIX}replica_role", "1 with what a replica is for.", labels=("replica", "role"))
        for index, role in enumerate(self._roles):
            roles.add_metric((str(index), role), 1)
        return roles

    def _blocks(self, stats: Stats) -> GaugeMetricFamily:
        """Each block in one state. Held are those that a request has left behind for another engine to fetch."""
        counts = {
            "free": stats.blocks - stats.blocks_used - stats.blocks_cached,
            "used": stats.blocks_used - stats.blocks_held,
            "cached": stats.blocks_cached,
        }
        if self._roles:
            counts["held"] = stats.blocks_held
        return _by_state("kv_blocks", "Blocks of the KV cache.", counts)

    def _slots(self, stats: Stats) -> GaugeMetricFamily:
        """The devices' places for adapters, each in one state."""
        counts = {
            "free": max(self._engine.num_up * self._num_adapters - stats.adapters, 0),
            "used": stats.adapters_used,
            "cached": stats.adapters - stats.adapters_used,
        }
        return _by_state("lora_slots", "Places for adapters on the devices.", counts)

    def _states(self, stats: Stats) -> Iterator[tuple[str, str, float]]:
        yield "num_requests_running", "Sequences that run.", stats.running
        yield "num_requests_waiting", "Sequences that wait.", stats.waiting
        yield "kv_cache_usage_perc", "Share of the KV cache in use, 1 is all.", stats.blocks_used / stats.blocks
        if self._num_adapters:
            yield "num_loras_loading", "Adapters that sequences wait for.", stats.adapters_loading
        if self._roles:
            yield "num_requests_waiting_for_kv", "Sequences that wait for blocks of another engine.", stats.coming

    def _counts(self, stats: Stats) -> Iterator[tuple[str, str, float]]:
        yield "num_preemptions", "Times that a sequence gave way for want of memory.", stats.total_preemptions
        yield "prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.total_prefix_queries
        yield "prefix_cache_hits", "Tokens found in the prefix cache.", stats.total_prefix_hits
        yield "engine_steps", "Steps of the engine.", stats.total_steps
        yield "device_oom", "Steps that found no memory on the device.", stats.total_ooms
        if self._num_adapters:
            yield "lora_slot_loads", "Times that an adapter was put onto a device.", stats.total_adapter_loads
            yield (
                "lora_slot_evictions",
                "Times that an adapter on a device gave way for another.",
                stats.total_adapter_evictions,
            )
        if self._roles:
            yield "kv_transfers", "Sequences whose blocks went to another engine.", stats.total_received
            yield "kv_transfer_bytes", "Bytes of blocks that went to another engine.", stats.total_received_bytes
            yield (
                "kv_transfer_seconds",
                "Seconds that it took to carry blocks, part by part.",
                stats.total_transfer_seconds,
            )
            yield (
                "kv_transfer_exposed_seconds",
                "Seconds from the first token's being there to the last block's.",
                stats.total_exposed_seconds,
            )
            yield "kv_transfer_failures", "Sequences whose blocks could not be had.", stats.total_transfers_lost

    def _of_model[Family: (GaugeMetricFamily, CounterMetricFamily)](
        self, kind: type[Family], values: Iterator[tuple[str, str, float]]
    ) -> Iterator[Family]:
        for name, help, value in values:
            family = kind(f"{PREFIX}{name}", help, labels=("model_name",))
            family.add_metric((self._model,), value)
            yield family


def _by_state(name: str, help: str, counts: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}{name}", help, labels=("state",))
    for state, count in counts.items():
        family.add_metric((state,), count)
    return family
