"""`hex-llm plan`: which machine for a model, with which flags, how fast and at what cost."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hex_llm.catalog.machine_types import SLICES
from hex_llm.config import QUANTIZATION_SYNONYMS
from hex_llm.errors import ConfigError
from hex_llm.flags import FlagParser, flag, flags_of
from hex_llm.planning.model import read_model
from hex_llm.planning.placement import Demand, accelerators_of
from hex_llm.planning.plan import plan
from hex_llm.planning.report import as_json, text

SUMMARY = "Plan on which machine to serve a model, with which flags, how fast and at what cost."
_USUAL_LENGTH = 4096  # of the guides' examples


@dataclass(frozen=True, slots=True)
class Options:
    quantization: Literal["none", "awq", "int4", "w4a8", "int8", "w8a8", "fp8"] | None = flag(
        "Model",
        None,
        "Bits of the weights; as in the checkpoint unless given. awq: in a checkpoint that has them so. On a TPU,"
        " w4a8 gains nothing over int4.",
        synonyms=QUANTIZATION_SYNONYMS,
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = flag("Model", "auto", "Number type of the KV cache.")
    max_model_len: int | None = flag(
        "Model",
        None,
        f"Most tokens of a sequence; unless given, {_USUAL_LENGTH}, or those of a request if more, or the model's if"
        " less.",
    )
    hbm_utilization_factor: float = flag(
        "Model", 0.95, "The KV cache's share of the memory that the rest leaves.", above=0, at_most=1
    )

    input_len: int = flag("Load", 1000, "Tokens of a prompt.")
    output_len: int = flag("Load", 1000, "Tokens of an answer.")
    concurrency: int = flag("Load", 64, "Requests at once.", aliases=("max-concurrency",), at_most=1_000_000)

    accelerator: str | None = flag("Machine", None, f"Only this one: {', '.join(SLICES)}.")
    machine: str | None = flag("Machine", None, "Only this type of machine, such as ct5lp-hightpu-4t.")
    tensor_parallel_size: int | None = flag("Machine", None, "Devices of a copy of the model, to say them yourself.")
    disagg_topo: str | None = flag(
        "Machine", None, "Workers for prompts and workers for answers, such as 3,1; bench plan-disagg finds out which."
    )
    price_per_hour: float | None = flag(
        "Machine",
        None,
        "Dollars an hour of the whole machine, or all of them; list prices of TPUs unless given.",
        above=0,
    )

    json: bool = flag("Result", False, "Print the plan as JSON.")

    def __post_init__(self) -> None:
        for each in flags_of(Options):
            object.__setattr__(self, each.name, each.accept(getattr(self, each.name)))
        if self.accelerator is not None and self.accelerator not in SLICES:
            raise ConfigError(f"--accelerator={self.accelerator} is not one of {', '.join(SLICES)}.")
        if self.machine is not None:
            self._check_machine(self.machine)
        if self.price_per_hour is not None and self.machine is None and self.accelerator is None:
            raise ConfigError(
                f"--price_per_hour={self.price_per_hour} needs --machine or --accelerator, to say whose price it is."
            )

    def _check_machine(self, machine: str) -> None:
        types = dict.fromkeys(each.machine for slices in SLICES.values() for each in slices)
        if machine not in types:
            raise ConfigError(f"--machine={machine} is not one of {', '.join(types)}.")
        if self.accelerator not in (None, *accelerators_of(machine)):
            raise ConfigError(f"--machine={machine} has no {self.accelerator}: leave --accelerator out.")

    @property
    def accelerators(self) -> list[str]:
        if self.machine is not None:
            return list(accelerators_of(self.machine))
        return list(SLICES) if self.accelerator is None else [self.accelerator]


def main(argv: Sequence[str]) -> None:
    parser = FlagParser("hex-llm plan", SUMMARY, flags_of(Options))
    parser.usage = "%(prog)s MODEL [flags]"
    arguments, words = parser.parse(argv, {})
    if len(words) != 1:
        what = "a model's name or folder is missing" if not words else f"{words[1]!r} belongs to no flag"
        raise ConfigError(f"hex-llm plan takes one model: {what}.")
    options = Options(**vars(arguments))
    model = read_model(words[0], options.quantization, options.kv_cache_dtype)
    demand = _demand(options, model.shape.context)
    rows = plan(
        model,
        demand,
        options.accelerators,
        machine=options.machine,
        devices=options.tensor_parallel_size,
        price_per_hour=options.price_per_hour,
    )
    print(json.dumps(as_json(model, demand, rows), indent=2) if options.json else text(model, demand, rows))


def _demand(options: Options, context: int) -> Demand:
    request = options.input_len + options.output_len
    length = options.max_model_len or min(max(_USUAL_LENGTH, request), context)
    if request > length:
        raise ConfigError(
            f"--input_len={options.input_len} and --output_len={options.output_len} are {request} tokens, more than"
            f" --max_model_len={length}."
        )
    return Demand(
        input_len=options.input_len,
        output_len=options.output_len,
        concurrency=options.concurrency,
        max_model_len=length,
        factor=options.hbm_utilization_factor,
        disagg=None if options.disagg_topo is None else _workers(options.disagg_topo),
    )


def _workers(topology: str) -> tuple[int, int]:
    words = topology.split(",")
    if len(words) != 2 or not all(word.isdecimal() and 0 < int(word) < 1000 for word in words):
        raise ConfigError(f"--disagg_topo={topology[:60]} must be two whole numbers of at least 1, such as 3,1.")
    return int(words[0]), int(words[1])
