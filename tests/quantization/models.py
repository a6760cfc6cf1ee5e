"""The embedded model in quantized formats: fewer layers of it, and how well it answers."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

import hex_llm
from hex_llm import LLM, SamplingParams
from training import data

FOLDER = Path(hex_llm.__file__).parent / "assets" / "hex-mini"
HELD_OUT = Path(data.__file__).parent / "held_out.jsonl"


def first_layer(target: Path) -> Path:
    """The model without the layers after the first."""
    target.mkdir()
    tensors = load_file(FOLDER / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    config = json.loads((FOLDER / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return target


@cache
def questions(every: int) -> list[dict[str, Any]]:
    """Every so manieth that has one right answer; they are sorted by kind, so some of each."""
    found = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()]
    return [question for question in found if "answer" in question][::every]


@cache
def share_right(folder: Path, every: int, cache_folder: str | None, quantization: str | None = None) -> float:
    """Of the questions, those that a model answers exactly."""
    llm = LLM(
        model=str(folder),
        quantization=quantization,
        max_model_len=512,
        max_decode_seqs=64,
        decode_seqs_padding=64,
        prefill_len_padding=512,
        max_num_batched_tokens=512,
        max_prefill_seqs=16,
        num_blocks=1025,
        warmup=False,
        compilation_cache_dir=cache_folder,
    )
    asked = questions(every)
    sampling = SamplingParams(temperature=0, max_tokens=200)
    told = llm.chat([question["messages"] for question in asked], sampling, progress=False)
    right = [reply.outputs[0].text == question["answer"] for reply, question in zip(told, asked, strict=True)]
    return sum(right) / len(right)
