"""`hex-llm tune`: short runs on this machine, to find the flags that are fastest within targets."""

import itertools
import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hex_llm.bench.tune.axes import axes_for, start
from hex_llm.bench.tune.search import Targets, Trial, search
from hex_llm.bench.tune.trial import Load, run_trial
from hex_llm.config import Config, config_parser
from hex_llm.errors import ConfigError, StartError
from hex_llm.flags import FlagParser, flag, flags_of

SUMMARY = "Try flags of a server on this machine, and say which are fastest within targets."


@dataclass(frozen=True)
class Options:
    """The flags of `hex-llm tune`; those of the server come after them, behind --."""

    input_len: int = flag("Load", 1000, "Tokens of a prompt.")
    output_len: int = flag("Load", 200, "Tokens of an answer.")
    max_concurrency: int = flag("Load", 16, "Requests at a time.")
    num_prompts: int | None = flag("Load", None, "Requests of a run; three times --max_concurrency unless given.")
    ttft_ms: float | None = flag("Targets", None, "The time to the first token that is not to be passed.", above=0)
    tpot_ms: float | None = flag("Targets", None, "The time per output token that is not to be passed.", above=0)
    percentile: int = flag("Targets", 90, "Of the times that targets are about.", at_most=99)
    budget_s: float = flag("Search", 900.0, "No run is begun after so many seconds.", above=0)
    trial_timeout_s: float = flag("Search", 600.0, "For a server to start, and for its load.", above=0)
    json: str | None = flag("Result", None, "Also write the result to this file.")

    def __post_init__(self) -> None:
        for each in flags_of(Options):
            object.__setattr__(self, each.name, each.accept(getattr(self, each.name)))
        if self.json is not None and not Path(self.json).absolute().parent.is_dir():
            raise ConfigError(f"--json={self.json} is in a folder that does not exist.")


def main(argv: Sequence[str]) -> None:
    options, server_flags = _parse(argv)
    targets = Targets(options.ttft_ms, options.tpot_ms)
    axes = axes_for(options.max_concurrency, _given(server_flags))
    load = Load(
        options.input_len,
        options.output_len,
        options.max_concurrency,
        options.num_prompts or 3 * options.max_concurrency,
        options.percentile,
    )
    end = time.monotonic() + options.budget_s
    trials: list[Trial] = []
    print(f"{'tokens/s':>9}  {f'p{load.percentile} TTFT':>10}  {f'p{load.percentile} TPOT':>10}  flags", flush=True)
    with tempfile.TemporaryDirectory() as name:
        found = search(
            start(options.max_concurrency, axes),
            axes,
            targets,
            lambda setting: run_trial(setting, server_flags, load, Path(name), options.trial_timeout_s),
            lambda: time.monotonic() < end,
        )
        best, _ = first = next(found)
        for trial, is_best in itertools.chain([first], found):
            trials.append(trial)
            best = trial if is_best else best
            print(_row(trial, is_best), flush=True)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(_report(argv, load, targets, trials, best), indent=2) + "\n")
    if best.failed is not None:
        raise StartError(f"No setting could be measured. {best.failed}")
    print(_advice(best, targets, server_flags))


def _parse(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The flags of `tune`, and those of the server, which are checked here: each run would fail of a wrong one."""
    own, server_flags = list(argv), []
    if "--" in own:
        place = own.index("--")
        own, server_flags = own[:place], own[place + 1 :]
    parser = FlagParser("hex-llm tune", SUMMARY, flags_of(Options))
    parser.usage = "%(prog)s [flags] [-- flags of the server, its model among them]"
    arguments, words = parser.parse(own, {})
    if words:
        raise ConfigError(f"{words[0]!r} belongs to no flag; those of the server come behind --.")
    Config.from_args(server_flags)
    if taken := _given(server_flags) & {"host", "port"}:
        raise ConfigError(f"--{min(taken)} is not for here: every server that is tried has an address of its own.")
    return Options(**vars(arguments)), server_flags


def _given(server_flags: Sequence[str]) -> set[str]:
    """The names of the flags, in whatever spelling they came."""
    arguments, _ = config_parser("hex-llm tune", SUMMARY, server=True).parse(server_flags, {})
    return set(vars(arguments))


def _row(trial: Trial, is_best: bool) -> str:
    if trial.failed is not None:
        return f"{'failed':>9}  {'':>10}  {'':>10}  {trial.setting}: {trial.failed.splitlines()[-1][:160]}"
    mark = "  <- best so far" if is_best else ""
    return f"{trial.tokens_per_s:9.1f}  {trial.ttft_ms:7.1f} ms  {trial.tpot_ms:7.2f} ms  {trial.setting}{mark}"


def _advice(best: Trial, targets: Targets, server_flags: Sequence[str]) -> str:
    command = shlex.join(["hex-llm", "serve", *server_flags, *best.setting.flags])
    if best.excess(targets) > 1:
        return f"No setting met the targets; the closest is\n  {command}"
    return f"The fastest within the targets:\n  {command}"


def _report(argv: Sequence[str], load: Load, targets: Targets, trials: list[Trial], best: Trial) -> dict:
    def told(trial: Trial) -> dict:
        figures = {} if trial.failed is not None else {
            "tokens_per_s": trial.tokens_per_s, "ttft_ms": trial.ttft_ms, "tpot_ms": trial.tpot_ms
        }  # fmt: skip
        return {"flags": trial.setting.flags, "failed": trial.failed} | figures

    return {
        "arguments": list(argv),
        "load": asdict(load),
        "targets": asdict(targets),
        "trials": [told(trial) for trial in trials],
        "best": told(best),
    }
