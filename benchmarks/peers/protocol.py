"""What every peer's script shares: its arguments, the definition of the figures, and the file it answers with.

A script gives `measure` a function that loads the model and returns a `Generate`. Decode speed is, for every engine,
the tokens that came after the moment at which each request had its first one, over the time they took. This file
needs no package, because each peer has an environment of its own.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Timeline:
    """One batch, generated: seconds from its start to the first token of all requests and to the last of all."""

    first_s: float
    last_s: float
    decode_tokens: int
    outputs: list[list[int]] | None  # None where the engine does not show them


@dataclass(frozen=True)
class Job:
    model: Path
    work: Path
    variant: str
    threads: int


Generate = Callable[[list[list[int]], int], Timeline]


def arguments() -> argparse.Namespace:
    """What the benchmark asks of a script; every script takes the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where a converted model may be kept")
    parser.add_argument("--variant", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--input-len", type=int, required=True)
    parser.add_argument("--output-len", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def measure(load: Callable[[Job], Generate]) -> None:
    """Loads once, then times each batch once after a short warm-up of the same shape, and writes the figures."""
    options = arguments()
    prompts = json.loads((options.model / "prompts.json").read_text())
    generate = load(Job(options.model, options.work, options.variant, options.threads))
    figures = []
    for batch in options.batches:
        inputs = [prompt[: options.input_len] for prompt in prompts[:batch]]
        generate(inputs, WARMUP_TOKENS)
        timeline = generate(inputs, options.output_len)
        figures.append({"batch": batch} | figures_of(timeline, batch, options.output_len))
    options.json.write_text(json.dumps(figures))


def figures_of(timeline: Timeline, batch: int, output_len: int) -> dict[str, object]:
    if timeline.outputs is not None:
        lengths = [len(output) for output in timeline.outputs]
        if lengths != [output_len] * batch:
            raise SystemExit(f"asked for {batch} outputs of {output_len} tokens, got lengths {lengths}")
    decode_s = timeline.last_s - timeline.first_s
    return {
        "prefill_s": timeline.first_s,
        "decode_s": decode_s,
        "total_s": timeline.last_s,
        "decode_tokens_per_s": timeline.decode_tokens / decode_s,
        "outputs": timeline.outputs,
    }


def lockstep(marks: list[float], outputs: list[list[int]]) -> Timeline:
    """Of an engine whose requests advance together: `marks` holds the start, then the end of each step."""
    return Timeline(marks[1] - marks[0], marks[-1] - marks[0], len(outputs) * (len(marks) - 2), outputs)
