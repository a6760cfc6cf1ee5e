"""The flags of `hex-llm bench plan-disagg`, and the rates that they amount to."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hex_llm.bench.disagg.fit import Point, fit_decode, fit_prefill, offline_points, read_points
from hex_llm.bench.disagg.load import Load
from hex_llm.bench.disagg.plan import Targets
from hex_llm.bench.disagg.presets import PRESETS, Preset
from hex_llm.bench.disagg.rates import Bounds, Link, Rates, Times, chunked_steps
from hex_llm.errors import ConfigError
from hex_llm.flags import FlagParser, flag, flags_of

SUMMARY = "Simulate which split into prefill and decode workers meets targets."


@dataclass(frozen=True, slots=True)
class Options:
    workers: int = flag("Plan", 4, "Workers in all: every split of them is tried.", at_most=64)
    ttft_ms: float = flag("Plan", 500.0, "The time to the first token that is wanted.", above=0)
    tpot_ms: float = flag("Plan", 50.0, "The time per token after it that is wanted, mean of a request.", above=0)
    itl_ms: float = flag("Plan", math.inf, "The time between any two tokens that is wanted.", above=0)
    percentile: float = flag(
        "Plan",
        99.0,
        "Percent of the requests (and of the gaps for itl_ms) that shall be in time.",
        above=0,
        at_most=100,
    )

    request_rate: float | None = flag("Load", None, "Requests per second, at random.", above=0, at_most=1e6)
    max_concurrency: int | None = flag(
        "Load",
        None,
        "In place of a rate, as many requests at once as this, all the time: what bench serve measures with the same"
        " flag, to see how far the simulation is right.",
    )
    input_len: int = flag("Load", 1000, "Tokens of a prompt, on average.")
    output_len: int = flag("Load", 200, "Tokens of an answer, on average.")
    input_spread: float = flag(
        "Load",
        0.0,
        "Standard deviation of a prompt's tokens, over their mean; they are drawn lognormally.",
        at_least=0,
        at_most=10,
    )
    output_spread: float = flag("Load", 0.0, "The same of answers.", at_least=0, at_most=10)
    max_model_len: int | None = flag("Load", None, "Most tokens of a request; what is drawn longer is cut.", at_least=2)
    num_requests: int = flag(
        "Load", 2000, "Requests to simulate; the first and last tenth do not count.", at_least=10, at_most=1_000_000
    )
    seed: int = flag("Load", 0, "Of arrival times and lengths.", at_least=0)

    preset: str | None = flag(
        "Worker", None, f"Measured rates to start from, which other flags replace: {', '.join(PRESETS)}."
    )
    measured: str | None = flag(
        "Worker", None, "Files that bench offline --json wrote, with commas between; they are used for points."
    )
    decode_points: str | None = flag(
        "Worker",
        None,
        "Measured decode steps as sequences:context of each:ms, such as 1:1500:4.1,64:1500:7.7,64:200:4.5.",
    )
    decode_us: str | None = flag(
        "Worker", None, "Or microseconds of a decode step, of each sequence, of each token of theirs: 4000,7.3,0.034."
    )
    prefill_points: str | None = flag(
        "Worker",
        None,
        "Measured times of prompts in steps of step_tokens, as prompts at once:tokens of each:ms to all first tokens.",
    )
    prefill_us: str | None = flag(
        "Worker", None, "Or microseconds of a step, of each token, of each token that one sees: 500,22,0.001."
    )
    mixed_token_us: float | None = flag(
        "Worker", None, "Microseconds of a prompt's token beside decodes; as in prefill unless given.", at_least=0
    )
    kv_tokens: int | None = flag("Worker", None, "Tokens that a worker's KV cache holds.")
    max_decode_seqs: int | None = flag("Worker", None, "Most sequences that a worker decodes; 256 unless given.")
    step_tokens: int | None = flag(
        "Worker", None, "Most tokens of a chunked step without decodes: 2048 unless given, 8192 on a GPU."
    )
    mixed_tokens: int | None = flag(
        "Worker", None, "Most tokens of a step that also decodes; step_tokens unless given, 512 on a GPU."
    )
    split_tokens: int | None = flag(
        "Worker", None, "Most tokens of a step in a split; step_tokens unless given, and at most 1024 then."
    )
    kv_bytes_per_token: int | None = flag("Worker", None, "Bytes of a token's keys and values in all layers.")
    transfer_gb_per_s: float | None = flag(
        "Worker", None, "10^9 bytes a second that one worker sends to another at most; bench serve reports it.", above=0
    )

    json: str | None = flag("Result", None, "Also write the result to this file.")

    def __post_init__(self) -> None:
        for each in flags_of(Options):
            object.__setattr__(self, each.name, each.accept(getattr(self, each.name)))
        if (self.request_rate is None) == (self.max_concurrency is None):
            raise ConfigError("One of --request_rate and --max_concurrency must be given, and not both.")
        for name in ("mixed_token_us", "ttft_ms", "tpot_ms"):
            if getattr(self, name) == math.inf:
                raise ConfigError(f"--{name}=inf must be finite.")
        if self.preset is not None and self.preset not in PRESETS:
            raise ConfigError(f"--preset={self.preset} is not one of {', '.join(PRESETS)}.")
        for one, other in (("decode_points", "decode_us"), ("prefill_points", "prefill_us")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ConfigError(f"--{one} and --{other} say the same thing; give one of them.")
        if self.measured is not None and self.decode_us is not None and self.prefill_us is not None:
            raise ConfigError(f"--measured={self.measured} is of no use with both --decode_us and --prefill_us.")
        if self.json is not None and not Path(self.json).absolute().parent.is_dir():
            raise ConfigError(f"--json={self.json} is in a folder that does not exist.")


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a command line says."""

    workers: int
    rates: Rates
    load: Load
    targets: Targets
    json: Path | None


def parse_settings(argv: Sequence[str]) -> Settings:
    parser = FlagParser("hex-llm bench plan-disagg", SUMMARY, flags_of(Options))
    parser.usage = "%(prog)s [flags]"
    arguments, words = parser.parse(argv, {})
    if words:
        raise ConfigError(f"{words[0]!r} belongs to no flag.")
    options = Options(**vars(arguments))
    rates = rates_of(options)
    return Settings(
        workers=options.workers,
        rates=rates,
        load=Load(
            rate=options.request_rate or math.inf,
            prompt=options.input_len,
            answer=options.output_len,
            prompt_spread=options.input_spread,
            answer_spread=options.output_spread,
            longest=min(options.max_model_len or rates.bounds.kv_tokens, rates.bounds.kv_tokens),
            count=options.num_requests,
            seed=options.seed,
            concurrency=options.max_concurrency,
        ),
        targets=Targets(
            ttft_s=options.ttft_ms / 1000,
            tpot_s=options.tpot_ms / 1000,
            itl_s=options.itl_ms / 1000,
            percent=options.percentile,
        ),
        json=Path(options.json) if options.json else None,
    )


def rates_of(options: Options) -> Rates:
    preset = PRESETS[options.preset] if options.preset else None
    bounds = _bounds(options, preset)
    decodes, prompts = _points(options)
    if options.decode_us is not None:
        decode = _three(options.decode_us, "decode_us")
    else:
        decode = fit_decode(
            decodes or (preset.decodes if preset else _missing("decode_points", "decode_us", "measured"))
        )
    if options.prefill_us is not None:
        prefill = _three(options.prefill_us, "prefill_us")
    else:
        found = prompts or (preset.prompts if preset else _missing("prefill_points", "prefill_us", "measured"))
        # A preset was measured in steps of its own size, whatever is asked for.
        prefill = fit_prefill(found, chunked_steps(preset.bounds if preset and not prompts else bounds))
    if options.mixed_token_us is not None:
        mixed = options.mixed_token_us / 1e6
    else:
        mixed = preset.mixed_token_s if preset and not prompts and options.prefill_us is None else prefill[1]
    num_bytes = options.kv_bytes_per_token or (preset.kv_bytes_per_token if preset else _missing("kv_bytes_per_token"))
    rate = options.transfer_gb_per_s or _missing("transfer_gb_per_s", preset=False)
    return Rates(Times(*decode, *prefill, mixed), bounds, Link(num_bytes, rate * 1e9))


def _bounds(options: Options, preset: Preset | None) -> Bounds:
    names = [each.name for each in dataclasses.fields(Bounds)]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if preset is not None:
        return dataclasses.replace(preset.bounds, **given)
    if "kv_tokens" not in given:
        _missing("kv_tokens")
    if "step_tokens" in given:
        given.setdefault("mixed_tokens", given["step_tokens"])
    return Bounds(**{"max_decode_seqs": 256, **given})


def _points(options: Options) -> tuple[list[Point], list[Point]]:
    decodes, prompts = [], []
    for name in options.measured.split(",") if options.measured else ():
        found = offline_points(Path(name))
        decodes += found[0]
        prompts += found[1]
    if options.decode_points is not None:
        decodes += read_points(options.decode_points, "decode_points")
    if options.prefill_points is not None:
        prompts += read_points(options.prefill_points, "prefill_points")
    return decodes, prompts


def _three(text: str, name: str) -> tuple[float, float, float]:
    try:
        first, second, third = (float(word) / 1e6 for word in text.split(","))
    except ValueError:
        first = second = third = math.nan
    if not all(0 <= each < math.inf for each in (first, second, third)) or not first + second + third > 0:
        raise ConfigError(f"--{name}={text} must be three microseconds of at least 0, not all of them 0.")
    return first, second, third


def _missing(*names: str, preset: bool = True) -> NoReturn:
    words = [f"--{name}" for name in (*names, *(["preset"] if preset else []))]
    raise ConfigError(f"{words[0]} must be given" + (f", or {' or '.join(words[1:])}." if words[1:] else "."))
