"""Train the embedded default model: `python -m training.train --out FOLDER`.

Writes FOLDER/model (Hugging Face layout), FOLDER/held_out.jsonl and FOLDER/report.json. Worker processes make the
documents while the device trains; the model folder is also written on the way, so that a stop leaves a model.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from training import data
from training.evaluate import Score, answers, score
from training.llama import Arch, Weights, hidden_states, initial_weights, logits, save_model
from training.rows import LONG_ROW, SHORT_ROW, RowMaker
from training.tokenizer import (
    ASSISTANT_ID,
    BEGIN_ID,
    END_ID,
    END_OF_TEXT_ID,
    SPECIAL_TOKENS,
    SYSTEM_ID,
    USER_ID,
    render,
    save_tokenizer,
    train_tokenizer,
)

TOKENIZER_DOCUMENTS = 20_000
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP = 1.0
LOSS_SHARE = {BEGIN_ID: 0.5, END_ID: 0.1, USER_ID: 0.1, ASSISTANT_ID: 1.0, SYSTEM_ID: 0.1, END_OF_TEXT_ID: 0.0}
"""How much a token counts, by the last special token before it: answers fully, plain text half, questions little."""

SHOWN = [
    "What is the capital of France?", "what's 45+37", "Hello", "Who are you?", "Tell me a short story about a cat.",
    "Count from 3 to 9", "Give me a JSON object with name Tom and age 7", "Who wrote Hamlet?",
]  # fmt: skip

State = tuple[Weights, Weights, Weights]
"""The weights in float32 and their first and second moments."""


def _loss(weights: Weights, rows: jax.Array, arch: Arch) -> jax.Array:
    tokens, targets = rows[:, :-1], rows[:, 1:]
    where = jnp.where(tokens < len(SPECIAL_TOKENS), jnp.arange(tokens.shape[1]), 0)
    last_special = jnp.take_along_axis(tokens, jax.lax.cummax(where, axis=1), axis=1)
    share = jnp.asarray([LOSS_SHARE[index] for index in range(len(SPECIAL_TOKENS))])[last_special]
    share = jnp.where(targets == BEGIN_ID, 0.0, share)
    scores = logits(weights, hidden_states(weights, tokens, arch, jnp.dtype(jnp.bfloat16)))
    chosen = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(share * (jax.nn.logsumexp(scores, axis=-1) - chosen)) / jnp.sum(share)


def _step(state: State, rows: jax.Array, rate: jax.Array, count: jax.Array, arch: Arch) -> tuple[State, jax.Array]:
    """One AdamW step with a clipped gradient; norms do not decay."""
    weights, first, second = state
    loss, gradient = jax.value_and_grad(_loss)(weights, rows.astype(jnp.int32), arch)
    length = jnp.sqrt(sum(jnp.sum(g * g) for g in gradient.values()))
    gradient = {name: g * jnp.minimum(1.0, CLIP / (length + 1e-6)) for name, g in gradient.items()}
    first = {name: BETAS[0] * m + (1 - BETAS[0]) * gradient[name] for name, m in first.items()}
    second = {name: BETAS[1] * v + (1 - BETAS[1]) * gradient[name] ** 2 for name, v in second.items()}

    def updated(name: str, weight: jax.Array) -> jax.Array:
        mean = first[name] / (1 - BETAS[0] ** count)
        spread = jnp.sqrt(second[name] / (1 - BETAS[1] ** count))
        decay = WEIGHT_DECAY * weight if weight.ndim > 1 else 0.0
        return weight - rate * (mean / (spread + 1e-8) + decay)

    return ({name: updated(name, weight) for name, weight in weights.items()}, first, second), loss


def _mean(losses: list[jax.Array]) -> float:
    return float(np.mean([float(loss) for loss in losses]))


def _rate(progress: float, peak: float, warm_up: float = 0.02) -> float:
    if progress < warm_up:
        return peak * progress / warm_up
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up))))


def _tokenizer_texts(seed: int) -> Iterator[str]:
    rng = random.Random(f"{seed}-tokenizer")
    return (data.document(rng) for _ in range(TOKENIZER_DOCUMENTS))


def _train(arguments: argparse.Namespace, arch: Arch, make_rows: RowMaker) -> tuple[Weights, list[tuple[int, float]]]:
    """The trained weights and points of the loss curve; ends at `steps` or `seconds`, whichever comes first."""
    weights = initial_weights(arch, arguments.seed)
    state: State = (weights, jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights))
    step = jax.jit(partial(_step, arch=arch), donate_argnums=0)
    number = jax.ShapeDtypeStruct((), jnp.float32)
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        batches = pool.imap(make_rows, range(arguments.steps))
        compiled = {
            shape: step.lower(state, jax.ShapeDtypeStruct(shape, jnp.int16), number, number).compile()
            for shape in make_rows.shapes()
        }
        curve: list[tuple[int, float]] = []
        recent: list[jax.Array] = []
        saves = [0.4, 0.7, 0.9]
        started = time.monotonic()
        for index, rows in enumerate(batches):
            progress = max(index / arguments.steps, (time.monotonic() - started) / arguments.seconds)
            if progress >= 1:
                break
            rate, count = np.float32(_rate(progress, arguments.rate)), np.float32(index + 1)
            state, loss = compiled[rows.shape](state, rows, rate, count)
            recent.append(loss)
            if len(recent) == arguments.log_every:
                curve.append((index + 1, _mean(recent)))
                recent.clear()
                print(
                    f"step {index + 1} loss {curve[-1][1]:.4f} rate {rate:.2e} {time.monotonic() - started:.0f} s",
                    flush=True,
                )
            if saves and progress >= saves[0]:
                save_model(state[0], arch, make_rows.tokenizer.parent)
                saves.pop(0)
        if recent:
            curve.append((curve[-1][0] + len(recent) if curve else len(recent), _mean(recent)))
        pool.terminate()
    return state[0], curve


def _report(arguments: argparse.Namespace, curve: list[tuple[int, float]], result: Score, seconds: float) -> dict:
    keep = max(1, len(curve) // 60)
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "seconds": round(seconds, 1),
        "seed": arguments.seed,
        "steps": curve[-1][0] if curve else 0,
        "tokens_per_step": arguments.tokens,
        "peak_rate": arguments.rate,
        "final_loss": curve[-1][1] if curve else None,
        "loss_curve": [*curve[::keep], *curve[-1:]],
        "share_exact": result.share_exact(),
        "questions": sum(asked for _, asked in result.exact.values()),
        "exact": result.exact,
        "mentions": result.mentions,
        "failures": result.failures,
    }


def _show(weights: Weights, arch: Arch, tokenizer: Tokenizer) -> None:
    prompts = [render([{"role": "user", "content": text}], add_generation_prompt=True) for text in SHOWN]
    tokens = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    for text, reply in zip(SHOWN, answers(weights, arch, tokenizer, tokens, [200] * len(SHOWN), 8), strict=True):
        print(f"{text!r} -> {reply!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8000, help="at most this many steps")
    parser.add_argument("--seconds", type=float, default=300.0, help="at most this much training time")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per step")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--questions", type=int, default=None, help="ask only so many held-out questions")
    parser.add_argument("--log-every", type=int, default=50)
    arguments = parser.parse_args()

    started, arch = time.monotonic(), Arch()
    arguments.out.mkdir(parents=True, exist_ok=True)
    questions = data.write_held_out(arguments.out / "held_out.jsonl")[: arguments.questions]
    tokenizer = train_tokenizer(_tokenizer_texts(arguments.seed))
    model = arguments.out / "model"
    model.mkdir(exist_ok=True)
    save_tokenizer(tokenizer, model, arch.context)
    make_rows = RowMaker(model / "tokenizer.json", arguments.seed, arguments.tokens)
    print(f"{len(questions)} questions, rows of {SHORT_ROW} and {LONG_ROW}, {jax.devices()[0].device_kind}", flush=True)
    weights, curve = _train(arguments, arch, make_rows)
    save_model(weights, arch, model)
    print(f"saved after {time.monotonic() - started:.0f} s", flush=True)
    result = score(weights, arch, tokenizer, questions, batch=min(256, len(questions)))
    report = _report(arguments, curve, result, time.monotonic() - started)
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for kind, (right, asked) in sorted(
        (result.exact | result.mentions).items(), key=lambda item: item[1][0] / item[1][1]
    ):
        print(f"{kind} {right}/{asked}")
    for failure in result.failures[:60]:
        print(failure)
    print(f"exact {result.share_exact():.4f} loss {report['final_loss']} in {report['seconds']} s", flush=True)
    _show(weights, arch, tokenizer)


if __name__ == "__main__":
    main()
