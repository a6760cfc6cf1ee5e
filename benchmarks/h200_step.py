"""Part `step`: decode steps of the engine, without a server: how long they take, what Python and the device do in them.

The engine is that of the part `serve`, with its flags and its compiled steps.
"""

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.h200_clock import seconds
from benchmarks.h200_part import Results, Settings, run_part
from benchmarks.h200_settings import Sizes
from benchmarks.h200_trace import Profile, middle, read_profile, tracing
from hex_llm import log
from hex_llm.build import build_engine, find_model
from hex_llm.config import Config
from hex_llm.engine.admission import new_request
from hex_llm.engine.engine import Engine
from hex_llm.engine.output import Output
from hex_llm.engine.request import Request, SamplingParams
from hex_llm.runner.sampler import SamplingRows, choose_drawn, choose_filtered

STEPS_AFTER_A_TRACE = 10  # writing it takes the host
SAMPLING_PROGRAMS = ("choose", "sampl")  # words in the names of the programs that choose tokens
KERNELS_KEPT = 60
SAMPLINGS: dict[str, dict[str, Any]] = {
    "sampling": {"temperature": 0.0},
    "sampling_drawn": {"temperature": 0.8},
    "sampling_filtered": {"temperature": 0.8, "top_p": 0.95},
}


@dataclass(slots=True)
class Clock:
    """Stands between the engine and its runner, and adds up the time of each call."""

    runner: Any
    dispatch_s: float = 0.0
    wait_s: float = 0.0
    steps: int = 0

    def dispatch(self, step: Any) -> "Waiting":
        started = time.perf_counter()
        pending = self.runner.dispatch(step)
        self.dispatch_s += time.perf_counter() - started
        self.steps += 1
        return Waiting(self, pending)

    def reset(self) -> None:
        self.dispatch_s = self.wait_s = 0.0
        self.steps = 0


@dataclass(slots=True)
class Waiting:
    """A step on its way, whose reading is timed."""

    clock: Clock
    pending: Any

    def is_done(self) -> bool:
        return self.pending.is_done()

    def read(self) -> Any:
        started = time.perf_counter()
        result = self.pending.read()
        self.clock.wait_s += time.perf_counter() - started
        return result


def make_engine(settings: Settings, flags: Sequence[str], **changes: Any) -> tuple[Engine, float]:
    """An engine with a server's flags and no weights to load, and the seconds that it took."""
    words = [f"--model={settings.model()}", "--load_format=dummy", f"--compilation_cache_dir={settings.cache}", *flags]
    config = Config.from_args([*words, *(f"--{name}={value}" for name, value in changes.items())])
    started = time.monotonic()
    return build_engine(config, find_model(config)), time.monotonic() - started


def measure(settings: Settings, results: Results) -> None:
    log.configure()
    sizes = settings.plan.sizes
    results.command([sys.executable, "-m", "benchmarks.h200", "--only=step"])
    # What these steps need is compiled when the steps before the measurement come to it.
    engine, built_s = make_engine(settings, [*settings.plan.flags.serve, "--no-warmup"])
    results.detail("engine built s", round(built_s, 1))
    gc.freeze()  # as the server's engine does
    clock = Clock(engine._runner)
    engine._runner = clock
    for batch, name in zip(sizes.step_batches, ("64", "128", "1"), strict=True):
        with results.case(f"B={batch}"):
            requests = start_decodes(engine, batch, sizes, sizes.steps, {"temperature": 0.0})
            before = lengths(requests)
            timing: dict[str, Any] = time_steps(engine, clock, sizes.steps)
            contexts = (before + lengths(requests)) / 2
            timing["contexts"] = {"mean": contexts.mean(), "least": contexts.min(), "most": contexts.max()}
            finish(engine, requests)
            results.detail(f"step{name}", timing)
            results.figure(f"step{name}", timing["step_ms"])
            if name == "64":
                results.figure("python64", timing["python_ms"])
    with results.case("sampler"):
        _time_sampler(settings, results)
    for name, sampling in SAMPLINGS.items():
        with results.case(f"trace of {name}"):
            _trace(settings, results, engine, name, sampling)
    engine.check()


def _trace(settings: Settings, results: Results, engine: Engine, name: str, sampling: dict[str, Any]) -> None:
    sizes = settings.plan.sizes
    steps = sizes.traced_steps
    requests = start_decodes(engine, sizes.traced_batch, sizes, 2 * steps, sampling)
    folder = settings.folder / "trace" / name
    untraced = step_ms(engine, steps // 2)
    with tracing(folder):
        traced = step_ms(engine, steps)
    step_ms(engine, STEPS_AFTER_A_TRACE)
    untraced += step_ms(engine, steps // 2)
    finish(engine, requests)
    profile = read_profile(folder)
    results.detail(f"{name}: programs, count and us", profile.by("module"))
    share = profile.share(SAMPLING_PROGRAMS)
    alone = results.details.get("sampler alone, us", {}).get(name)
    if share is not None:
        results.figure(name, share)
    elif alone and "step64" in results.figures:
        results.detail(f"{name}: note", "the trace names no programs: it is the sampler's time alone over a step's")
        results.figure(name, alone / 1000 / results.figures["step64"])
    if name == "sampling":
        _record_idle(results, profile, float(np.mean(middle(traced))), float(np.mean(untraced)))


def _time_sampler(settings: Settings, results: Results) -> None:
    """By itself, without the programs around it."""
    rows, vocab = settings.plan.sizes.traced_batch, settings.plan.shape["vocab_size"]
    ones = jnp.ones(rows, jnp.float32)
    logits = jax.random.normal(jax.random.key(0), (rows, vocab), jnp.float32) * 4
    found = {}
    for name, sampling in SAMPLINGS.items():
        choose = choose_filtered if "top_p" in sampling else choose_drawn
        how = SamplingRows(
            temperature=ones * sampling["temperature"],
            top_p=ones * sampling.get("top_p", 1.0),
            top_k=jnp.zeros(rows, jnp.int32),
            min_p=ones * 0,
            seed=jnp.arange(rows, dtype=jnp.uint32),
            position=jnp.full(rows, settings.plan.sizes.step_context, jnp.int32),
        )
        found[name] = round(1e6 * seconds(jax.jit(choose), logits, how), 1)
    results.detail("sampler alone, us", found)


def _record_idle(results: Results, profile: Profile, traced_ms: float, untraced_ms: float) -> None:
    """The trace tells how long the kernels of a step take, and steps before and after it how long one takes in all.

    Gaps inside the trace are told as well, but tracing makes some of its own.
    """
    busy_ms = profile.busy_ns / profile.span_ns * traced_ms
    idle = 1 - busy_ms / untraced_ms
    # Below 0, tracing has slowed the kernels down; then its own gaps are what there is to tell.
    results.figure("idle64", idle if idle >= 0 else profile.idle_share)
    results.detail(
        "trace",
        {
            "step ms": round(traced_ms, 3),
            "step ms, untraced": round(untraced_ms, 3),
            "kernels' ms in a step": round(busy_ms, 3),
            "idle share while traced": round(profile.idle_share, 4),
            "kernels": len(profile.kernels),
        },
    )
    results.detail("kernels, count and us", dict(list(profile.by("name").items())[:KERNELS_KEPT]))


def start_decodes(engine: Engine, batch: int, sizes: Sizes, steps: int, sampling: dict[str, Any]) -> list[Request]:
    """Requests that have decoded for a while, with sequences that are in the next steps on average as long as asked."""
    random, limits = np.random.default_rng(batch), engine.limits
    first = sizes.step_context - steps // 2
    last = first - sizes.settle_steps - batch // 4  # what is too short decodes for longer before it is timed
    # Those that are started first decode while the others' prompts are computed, so they are given less to begin with.
    head_start = min(batch * last / (limits.mixed_tokens or limits.step_tokens), last / 2)
    requests = []
    for number in range(batch):
        length = max(int(last - head_start * (1 - (number + 1) / batch)), 1)
        prompt = random.integers(0, limits.vocab_size, length).tolist()
        params = SamplingParams(ignore_eos=True, max_tokens=limits.max_model_len - length, seed=1, **sampling)
        requests.append(new_request(f"{batch}-{number}", prompt, params, limits))
        engine.add(requests[-1])
    started: set[str] = set()
    while len(started) < batch:
        started.update(output.request_id for output in _step_of_all(engine))
    while lengths(requests).mean() < first:
        _step_of_all(engine)
    return requests


def _step_of_all(engine: Engine) -> list[Output]:
    """A step after which no request has ended: what computes numbers that are none would be timed for ever."""
    outputs = engine.step()
    ended = [output for output in outputs if output.finish_reason is not None]
    assert not ended, f"{len(ended)} requests have ended, the first of them: {ended[0]}"
    return outputs


def step_ms(engine: Engine, steps: int) -> list[float]:
    marks = [time.perf_counter()]
    for _ in range(steps):
        _step_of_all(engine)
        marks.append(time.perf_counter())
    return (1000 * np.diff(marks)).tolist()


def time_steps(engine: Engine, clock: Clock, steps: int) -> dict[str, float]:
    """Means over steps, in ms. Python's part is all but the wait for the device."""
    clock.reset()
    gaps = np.asarray(step_ms(engine, steps))
    wait, dispatch = 1000 * clock.wait_s / steps, 1000 * clock.dispatch_s / max(clock.steps, 1)
    return {
        "step_ms": float(gaps.mean()),
        "median_ms": float(np.median(gaps)),
        "p99_ms": float(np.percentile(gaps, 99)),
        "python_ms": float(gaps.mean()) - wait,
        "dispatch_ms": dispatch,
        "schedule_and_update_ms": float(gaps.mean()) - wait - dispatch,
        "wait_ms": wait,
    }


def lengths(requests: Sequence[Request]) -> np.ndarray:
    return np.asarray([len(each.prompt) + len(each.output) for each in requests])


def finish(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()


if __name__ == "__main__":
    run_part(measure)
