"""`hex-llm bench offline`: how fast the engine is, without a server in front."""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hex_llm.build import Model, build_engine, find_model
from hex_llm.config import config_parser, parse_config
from hex_llm.engine.admission import new_request
from hex_llm.engine.engine import Engine
from hex_llm.engine.request import SamplingParams
from hex_llm.errors import ConfigError
from hex_llm.version import __version__


@dataclass(frozen=True, slots=True)
class Measurement:
    """One round: so many requests at once, all of the same lengths. Seconds count from the round's start."""

    requests: int
    input_tokens: int
    output_tokens: int
    first_token_s: float  # when every request had its first token
    total_s: float
    decode_tokens_per_s: float  # the tokens that came after `first_token_s`, over the time they took
    output_tokens_per_s: float
    total_tokens_per_s: float


def main(argv: Sequence[str]) -> None:
    parser = config_parser("hex-llm bench offline", "Measure the engine without a server.")
    bench = parser.add_argument_group("Benchmark")
    bench.add_argument("--input-len", type=int, default=128, help="Tokens of each prompt; 128 by default.")
    bench.add_argument(
        "--output-len", type=int, default=128, help="Tokens of each answer, end tokens ignored; 128 by default."
    )
    bench.add_argument(
        "--num-prompts",
        type=int,
        default=16,
        help="Requests in all, after a first round that is not measured; 16 by default.",
    )
    bench.add_argument(
        "--batch", type=int, default=16, help="Requests at once, 16 by default; the next ones wait for these."
    )
    bench.add_argument("--json", type=Path, help="Also write the result to this file.")
    config, arguments = parse_config(parser, argv)
    for name in ("input_len", "output_len", "num_prompts", "batch"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(arguments, name)} must be at least 1.")
    config.check_one_engine()
    if arguments.batch > config.max_decode_seqs:
        raise ConfigError(
            f"--batch={arguments.batch} is more than --max_decode_seqs={config.max_decode_seqs}, so not all of them"
            " would run at once."
        )
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise ConfigError(f"--json={arguments.json} is in a folder that does not exist.")
    model = find_model(config)
    length = arguments.input_len + arguments.output_len
    if length > model.max_model_len:
        raise ConfigError(
            f"--input-len={arguments.input_len} and --output-len={arguments.output_len} make {length} tokens; "
            f"the context is {model.max_model_len} tokens."
        )
    started = time.monotonic()
    engine = build_engine(config, model)
    ready = time.monotonic() - started
    sizes = [min(arguments.batch, arguments.num_prompts - i) for i in range(0, arguments.num_prompts, arguments.batch)]
    measure(engine, sizes[0], arguments.input_len, min(4, arguments.output_len), seed=0)  # first runs fill caches
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        rounds = [
            measure(engine, size, arguments.input_len, arguments.output_len, seed=seed)
            for seed, size in bar.track(list(enumerate(sizes, 1)), description="Measuring")
        ]
    asked = {name: getattr(arguments, name) for name in ("input_len", "output_len", "batch")}
    measured = {"ready_s": ready, "rounds": [asdict(each) for each in rounds]}
    report = summary(rounds) | measured | asked | {"arguments": list(argv)} | _facts(model)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    Console().print(_table(report))


def measure(engine: Engine, size: int, input_len: int, output_len: int, *, seed: int) -> Measurement:
    """Runs `size` requests at once, with random prompts, greedily."""
    random = np.random.default_rng(seed)
    prompts = random.integers(0, engine.limits.vocab_size, (size, input_len))
    sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    started = time.monotonic()
    for number, prompt in enumerate(prompts.tolist()):
        engine.add(new_request(f"{seed}-{number}", prompt, sampling, engine.limits))
    counts: dict[str, int] = {}
    first, before = started, 0  # when the last first token came, and how many had come by then
    while engine.has_work:
        outputs = engine.step()
        starts = any(output.request_id not in counts for output in outputs)
        for output in outputs:
            counts[output.request_id] = counts.get(output.request_id, 0) + len(output.tokens)
        if starts:
            first, before = time.monotonic(), sum(counts.values())
    total = time.monotonic() - started
    assert list(counts.values()) == [output_len] * size, "a request came back with other than its tokens"
    num_outputs = size * output_len
    return Measurement(
        requests=size,
        input_tokens=size * input_len,
        output_tokens=num_outputs,
        first_token_s=first - started,
        total_s=total,
        decode_tokens_per_s=(num_outputs - before) / max(total - (first - started), 1e-9),
        output_tokens_per_s=num_outputs / total,
        total_tokens_per_s=size * (input_len + output_len) / total,
    )


def summary(rounds: Sequence[Measurement]) -> dict[str, float]:
    """Medians over the rounds for rates, sums for what adds up."""
    return {
        "requests": sum(each.requests for each in rounds),
        "input_tokens": sum(each.input_tokens for each in rounds),
        "output_tokens": sum(each.output_tokens for each in rounds),
        "total_s": sum(each.total_s for each in rounds),
        "first_token_s": statistics.median(each.first_token_s for each in rounds),
        "decode_tokens_per_s": statistics.median(each.decode_tokens_per_s for each in rounds),
        "output_tokens_per_s": statistics.median(each.output_tokens_per_s for each in rounds),
        "total_tokens_per_s": statistics.median(each.total_tokens_per_s for each in rounds),
    }


def _facts(model: Model) -> dict[str, str]:
    return {
        "model": model.name,
        "dtype": str(model.dtype),
        "device": jax.devices()[0].device_kind,
        "version": __version__,
    }


def _table(report: dict) -> Table:
    table = Table(title=f"{report['model']}, {report['dtype']}", show_header=False)
    for name, unit in (
        ("requests", ""), ("input_tokens", ""), ("output_tokens", ""), ("ready_s", "s"), ("total_s", "s"),
        ("first_token_s", "s"), ("decode_tokens_per_s", "tokens/s"), ("output_tokens_per_s", "tokens/s"),
        ("total_tokens_per_s", "tokens/s"),
    ):  # fmt: skip
        value = report[name]
        table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:,.2f}", unit)
    return table
