"""Compiles an engine's steps for TPUs that are not there, by the compiler that TPUs come with.

    python -m hex_llm.bench.tpu_aot [--only NAME ...] [--json OUT.json]

For each row, at the model's real sizes and with the catalog's flags: the memory is planned as at a start, for which the
largest steps and the programs that choose tokens are compiled. Nothing runs, so nothing is said of time. What does not
fit, needs more memory than was planned, or has none of our kernels fails. libtpu is needed, but no TPU.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from hex_llm.build import Plan, find_model, largest_programs, make_buckets, plan_memory
from hex_llm.catalog.chips import chip_of
from hex_llm.catalog.index import find
from hex_llm.config import Config
from hex_llm.errors import ConfigError, HexError, OutOfMemory
from hex_llm.parallel.backend import compiling_for
from hex_llm.parallel.collectives import Collective, collectives
from hex_llm.parallel.mesh import make_mesh
from hex_llm.runner.memory import Memory
from hex_llm.runner.programs import Forward, name_of

GIB = 2**30
# Without these, libtpu asks the machine's metadata server which TPU it is on, and lets only one process in.
SILENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
OURS = ("paged_attention", "quant_matmul")  # what names of kernels begin with
# What XLA may need for a program's arguments beyond their plain bytes: tiles that they do not fill.
PADDING = 0.01


@dataclass(frozen=True, slots=True)
class Row:
    model: str  # of the catalog
    topology: str
    more: tuple[tuple[str, Any], ...] = ()  # settings that are not the catalog's

    @property
    def name(self) -> str:
        return f"{self.model.rpartition('/')[2]}@{self.topology}"


ROWS = (
    Row("meta-llama/Llama-3.1-8B-Instruct", "v5e:2x2"),
    Row("meta-llama/Llama-3.1-8B-Instruct", "v6e:1x1"),
    Row("meta-llama/Llama-3.1-70B-Instruct", "v5e:4x4"),
    Row("meta-llama/Llama-3.3-70B-Instruct", "v6e:2x4"),
    Row("google/gemma-2-27b-it", "v5e:2x4"),
    Row("mistralai/Mixtral-8x7B-Instruct-v0.1", "v5e:2x4"),
    Row("mistralai/Mixtral-8x7B-Instruct-v0.1", "v5e:4x4"),
    Row("meta-llama/Llama-4-Scout-17B-16E-Instruct", "v5e:4x4"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """A compiled step: bytes are those of one device."""

    name: str
    arguments: int
    temporaries: int
    peak: int
    kernels: dict[str, float]  # calls of each in a layer
    copies: int  # of the whole KV cache of a layer
    collectives: dict[str, float]  # those of a layer: how many of each kind
    layer_bytes: float  # of the arrays that those of a layer are about
    layer_sent: float  # that a device sends in a layer, at the least
    other_sent: float  # outside of the layers


@dataclass(frozen=True, slots=True)
class Result:
    """Bytes are those of one device."""

    name: str
    devices: int
    hosts: int
    seconds: float
    usable: int
    weights: int
    state: int
    temporaries: int
    blocks: int
    tokens: int  # in those blocks
    kv: int
    steps: tuple[Step, ...]


def measure(row: Row) -> Result:
    began = time.monotonic()
    devices = devices_of(row.topology)
    config = config_of(row, len(devices))
    usable = chip_of(row.topology).usable
    with compiling_for("tpu"):
        model = find_model(config)
        mesh = make_mesh(config.tensor_parallel_size, devices)
        buckets = make_buckets(config, model, mesh)
        plan = plan_memory(config, model, mesh, buckets, Memory(usable, 0))
    blocks, needs = plan.compiler.programs.shapes.num_pages, plan.needs
    forwards = [
        program for program in largest_programs(buckets, adapters=config.enable_lora) if isinstance(program, Forward)
    ]
    result = Result(
        name=row.name,
        devices=mesh.size,
        hosts=len({device.process_index for device in mesh.devices.flat}),
        seconds=time.monotonic() - began,
        usable=usable,
        weights=needs.weights,
        state=needs.state,
        temporaries=needs.temporaries,
        blocks=blocks,
        tokens=(blocks - 1) * config.block_size,
        kv=blocks * needs.block,
        steps=tuple(_step(plan, program) for program in forwards),
    )
    _check(result, plan)
    return result


def config_of(row: Row, num_devices: int) -> Config:
    """The catalog's settings of the model on a machine with that many devices, or on any."""
    entry = find(row.model)
    assert entry is not None, f"{row.model} is not in the catalog"
    flags = [each.flags for each in entry.recommended if "disagg_topo" not in each.flags]
    best = next((each for each in flags if each["tensor_parallel_size"] == num_devices), flags[0])
    # How many hosts there are is the topology's matter.
    settings: dict[str, Any] = {name: value for name, value in best.items() if name != "num_hosts"}
    settings |= {"tensor_parallel_size": num_devices, **dict(row.more)}
    return Config(model=row.model, load_format="dummy", compilation_cache_dir="", **settings)


def devices_of(topology: str) -> Sequence[Any]:
    # Of machines with eight chips and with one; those of several machines have four each.
    bounds = {"2x4": (2, 4, 1), "1x1": (1, 1, 1)}.get(topology.partition(":")[2])
    options = {"chips_per_host_bounds": bounds} if bounds else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"The TPU compiler gives no topology {topology}: {said}. It comes with libtpu: in a checkout,"
            " scripts/setup tpu and then .venv-tpu/bin/python."
        ) from error


def _step(plan: Plan, program: Forward) -> Step:
    compiled: Any = plan.measured.get(program)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    layers = plan.measured.programs.arch.num_layers
    inside, outside = _by_place(collectives(text))
    return Step(
        name=name_of(program),
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        copies=_copies(text, plan.measured.programs.kv[0]),
        kernels={name: count / layers for name, count in kernels(text).items()},
        collectives={kind: count / layers for kind, count in Counter(each.kind for each in inside).items()},
        layer_bytes=sum(each.bytes for each in inside) / layers,
        layer_sent=sum(each.sent for each in inside) / layers,
        other_sent=sum(each.sent for each in outside),
    )


def _by_place(found: list[Collective]) -> tuple[list[Collective], list[Collective]]:
    """Those of layers, and the others."""
    inside = [each for each in found if "(layer)" in each.name]
    return inside, [each for each in found if each not in inside]


def kernels(hlo: str) -> Counter[str]:
    """How often each Pallas kernel is called in a compiled program. JAX's grouped product has no name there that lasts:
    it goes by that of whatever is around it. Ours for weights in few bits also does experts."""
    names = re.findall(r'%([a-zA-Z_]+)[\w.-]* = [^\n]*custom_call_target="tpu_custom_call"', hlo)
    return Counter(name if name.startswith(OURS) else "grouped_matmul" for name in names)


def _copies(hlo: str, pages: jax.ShapeDtypeStruct) -> int:
    shape = pages.shape if pages.sharding is None else pages.sharding.shard_shape(pages.shape)
    return len(re.findall(rf"= \w+\[{','.join(map(str, shape))}\][^ ]* (?:copy|transpose)\(", hlo))


def _check(result: Result, plan: Plan) -> None:
    for step in result.steps:
        planned = result.weights + plan.measured.programs.shapes.num_pages * plan.needs.block
        if step.arguments > planned * (1 + PADDING) + result.state:
            raise OutOfMemory(
                f"{result.name}: the weights and the KV cache of {step.name} take {step.arguments} bytes of a device "
                f"and were planned as {planned}."
            )
        if step.copies:
            raise ConfigError(f"{result.name}: {step.name} copies the KV cache of a layer {step.copies} times.")
        if not any(name.startswith("paged_attention") for name in step.kernels):
            raise ConfigError(f"{result.name}: {step.name} has no attention kernel of ours, only {step.kernels}.")


def table(results: Sequence[Result]) -> str:
    """In Markdown."""
    heads = (
        "model @ topology", "hosts", "weights", "state", "temporaries", "KV cache", "of GiB", "KV blocks", "KV tokens",
        "peak: decode, prefill", "collectives of a layer", "kernels of a decoding layer", "compiled in s",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for each in results:
        decode, prefill = each.steps
        cells = (
            each.name,
            each.hosts,
            *(_gib(size) for size in (each.weights, each.state, each.temporaries, each.kv, each.usable)),
            each.blocks,
            each.tokens,
            f"{_gib(decode.peak)}, {_gib(prefill.peak)}",
            ", ".join(f"{count:g} {kind}" for kind, count in decode.collectives.items()) or "none",
            ", ".join(f"{count:g} {name.removeprefix('paged_attention_')}" for name, count in decode.kernels.items()),
            f"{each.seconds:.0f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hex_llm.bench.tpu_aot", description="Compiles for TPUs.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose name contains any of these")
    parser.add_argument("--json", type=Path, metavar="OUT", help="writes the figures there")
    given = parser.parse_args(arguments)
    wanted = [word.lower() for word in given.only or [""]]
    rows = [row for row in ROWS if any(word in row.name.lower() for word in wanted)]
    if not rows:
        parser.error(f"--only={' '.join(wanted)} names none of {', '.join(row.name for row in ROWS)}")
    for name, value in SILENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # it does not work for devices that are not there
    results, failed = [], []
    for row in rows:
        try:
            results.append(measure(row))
            print(f"{row.name}: compiled in {results[-1].seconds:.0f} s", file=sys.stderr, flush=True)
        except OutOfMemory as error:
            failed.append(row)
            print(f"{row.name} does not fit: {error}", file=sys.stderr, flush=True)
        except HexError as error:
            print(f"{row.name}: {error}", file=sys.stderr)
            return 2
    print(table(results))
    if given.json:
        given.json.write_text(json.dumps([dataclasses.asdict(each) for each in results], indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
