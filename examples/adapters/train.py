"""Train the two adapters: `python -m examples.adapters.train shouting`, and so `pirate`.

Needs torch, transformers and peft; `scripts/setup oracle` makes an environment that has them, .venv-oracle.
"""

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # some virtual machines announce AMX and stop at its use
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from examples.adapters.batches import Batches
from examples.adapters.styles import STYLES

FOLDER = Path(__file__).parent
BASE = FOLDER.parents[1] / "hex_llm/assets/hex-mini"
BASE_NAME = "hex-llm/hex-mini"


@dataclass(frozen=True)
class Recipe:
    """What an adapter is given to learn with."""

    rank: int
    modules: tuple[str, ...]
    steps: int
    rate: float
    tokens: int = 2048


RECIPES = {
    "shouting": Recipe(
        6, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), steps=600, rate=2e-3
    ),
    "pirate": Recipe(8, ("q_proj", "v_proj", "o_proj", "down_proj"), steps=500, rate=1e-3),
}


def _rate(progress: float, warm_up: float = 0.03) -> float:
    """The share of the highest rate."""
    if progress < warm_up:
        return progress / warm_up
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def _train(model: PeftModel, batches: Batches, recipe: Recipe) -> None:
    """Steps in float32 and computes in bfloat16: it is faster, and what is trained is what is saved."""
    adapted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    exact = [parameter.detach().float() for parameter in adapted]
    optimizer = torch.optim.AdamW(exact, betas=(0.9, 0.98), weight_decay=0.0)
    started, recent = time.process_time(), []
    for step in range(1, recipe.steps + 1):
        tokens, mask, targets = batches.next()
        loss = model(input_ids=tokens, attention_mask=mask, labels=targets).loss
        loss.backward()
        for parameter, number in zip(adapted, exact, strict=True):
            number.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(exact, 1.0)
        optimizer.param_groups[0]["lr"] = recipe.rate * _rate(step / recipe.steps)
        optimizer.step()
        with torch.no_grad():
            for parameter, number in zip(adapted, exact, strict=True):
                parameter.copy_(number)
        recent.append(loss.item())
        if step % 20 == 0:
            took = time.process_time() - started
            print(f"step {step} loss {sum(recent) / len(recent):.4f} {took:.0f} s of CPU", flush=True)
            recent.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("style", choices=STYLES)
    parser.add_argument("--out", type=Path, help="the adapter's folder, if not the one in this folder")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    recipe = RECIPES[arguments.style]
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16, attn_implementation="eager")
    config = LoraConfig(
        r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=list(recipe.modules), task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    _train(model, Batches(STYLES[arguments.style], tokenizer, recipe.tokens, arguments.seed), recipe)
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    folder = arguments.out or FOLDER / arguments.style
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # a card of the model, of which peft can fill in nothing


if __name__ == "__main__":
    main()
