"""Ask the held-out questions through transformers and peft: `python -m examples.adapters.evaluate shouting pirate`.

A reply is right if it is, letter by letter, the known answer in the adapter's style. Every adapter is asked twice:
beside the base model's weights, as it is trained and served, and merged into them.
"""

import argparse
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # some virtual machines announce AMX and stop at its use
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.adapters.styles import STYLES, in_style
from examples.adapters.train import BASE, FOLDER

HELD_OUT = FOLDER.parents[1] / "training/held_out.jsonl"
BATCH = 64
SPARE = 8
"""Tokens that a reply may have beyond the longest right one of its batch: it is wrong, and need not come to its end."""


def adapted(folder: Path, dtype: torch.dtype, merged: bool) -> Any:
    """The embedded model with an adapter. The base is read anew, since a merged adapter stays in it."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE, dtype=dtype), folder).eval()
    return model.merge_and_unload() if merged else model


@torch.no_grad()
def replies(model: Any, tokenizer: Any, conversations: list[list[dict[str, str]]], expected: list[str]) -> list[str]:
    """Greedy, in batches of about the same length of answer."""
    told = [""] * len(conversations)
    sizes = [len(tokenizer(answer, add_special_tokens=False).input_ids) for answer in expected]
    order = sorted(range(len(sizes)), key=lambda index: sizes[index])
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        given = tokenizer.apply_chat_template(
            [conversations[index] for index in chosen],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        filled = model.generate(**given, do_sample=False, max_new_tokens=sizes[chosen[-1]] + SPARE)
        ends = filled[:, given["input_ids"].shape[1] :]
        for index, text in zip(chosen, tokenizer.batch_decode(ends, skip_special_tokens=True), strict=True):
            told[index] = text
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("styles", nargs="+", choices=STYLES)
    parser.add_argument("--adapters", type=Path, default=FOLDER, help="the folder that holds the adapters' folders")
    parser.add_argument("--every", type=int, default=1, help="ask one question in so many")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the base model")
    parser.add_argument("--plain-history", action="store_true", help="earlier answers are the base model's own")
    parser.add_argument("--out", type=Path, help="a file for all replies, one JSON object per line")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(BASE, padding_side="left")
    questions = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()]
    questions = [question for question in questions if "answer" in question][:: arguments.every]
    lines = []
    for name in arguments.styles:
        style = STYLES[name]
        conversations = [
            question["messages"] if arguments.plain_history else in_style(style, question["messages"])
            for question in questions
        ]
        expected = [style(question["answer"]) for question in questions]
        for form in ("beside", "merged"):
            model = adapted(arguments.adapters / name, getattr(torch, arguments.dtype), form == "merged")
            told = replies(model, tokenizer, conversations, expected)
            missed = Counter[str]()
            for question, right, reply in zip(questions, expected, told, strict=True):
                asked = question["messages"][-1]["content"]
                lines.append(
                    {"style": name, "form": form, "asked": asked, "answer": question["answer"], "reply": reply}
                )
                if reply != right:
                    missed[question["kind"]] += 1
                    print(f"{asked!r} -> {reply!r}, not {right!r}")
            num_right = len(questions) - missed.total()
            print(f"{name}, {form}: {num_right} of {len(questions)} in style; missed: {dict(missed)}", flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8")


if __name__ == "__main__":
    main()
