"""Greedy answers to the held-out questions, compared with what was expected."""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from training.llama import Arch, Weights, hidden_states, logits
from training.tokenizer import END_ID, END_OF_TEXT_ID, render

_ROOM_FOR_STORY = 240
_LENGTHS = (64, 128, 256, 512)


@dataclass(frozen=True)
class Score:
    """Exact answers per kind, stories and the like (judged by what they mention) apart, and what went wrong."""

    exact: dict[str, tuple[int, int]]
    mentions: dict[str, tuple[int, int]]
    failures: list[dict[str, str]]

    def share_exact(self) -> float:
        right = sum(right for right, _ in self.exact.values())
        return right / max(1, sum(asked for _, asked in self.exact.values()))


@partial(jax.jit, static_argnames=("arch",), donate_argnames=("tokens",))
def _continue(weights: Weights, tokens: jax.Array, lengths: jax.Array, arch: Arch) -> tuple[jax.Array, jax.Array]:
    """Fill every row greedily until it ends; no cache, for the rows are short and this runs once."""
    rows = jnp.arange(tokens.shape[0])

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return ~jnp.all(state[2])

    def extend(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens, lengths, done = state
        hidden = hidden_states(weights, tokens, arch, weights["model.norm.weight"].dtype)[rows, lengths - 1]
        chosen = jnp.argmax(logits(weights, hidden), axis=-1).astype(tokens.dtype)
        done = done | (chosen == END_ID) | (chosen == END_OF_TEXT_ID)
        tokens = jnp.where(done[:, None], tokens, tokens.at[rows, lengths].set(chosen))
        lengths = jnp.where(done, lengths, lengths + 1)
        return tokens, lengths, done | (lengths >= tokens.shape[1])

    tokens, lengths, _ = jax.lax.while_loop(unfinished, extend, (tokens, lengths, lengths >= tokens.shape[1]))
    return tokens, lengths


def answers(
    weights: Weights, arch: Arch, tokenizer: Tokenizer, prompts: list[list[int]], room: list[int], batch: int
) -> list[str]:
    """The greedy continuation of every prompt, of about `room` tokens at most."""
    replies = [""] * len(prompts)
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[next(length for length in _LENGTHS if length >= len(prompt) + room[index])].append(index)
    for length, members in sorted(by_length.items()):
        for start in range(0, len(members), batch):
            chosen = members[start : start + batch]
            tokens = np.full((batch, length), END_OF_TEXT_ID, np.int32)
            lengths = np.full(batch, length, np.int32)
            for row, index in enumerate(chosen):
                tokens[row, : len(prompts[index])] = prompts[index]
                lengths[row] = len(prompts[index])
            filled, ends = jax.device_get(_continue(weights, jnp.asarray(tokens), jnp.asarray(lengths), arch))
            for row, index in enumerate(chosen):
                replies[index] = tokenizer.decode(filled[row, lengths[row] : ends[row]].tolist())
    return replies


def score(weights: Weights, arch: Arch, tokenizer: Tokenizer, questions: list[dict], batch: int) -> Score:
    """Ask every question with the weights as they are saved, in bfloat16."""
    weights = {name: weight.astype(jnp.bfloat16) for name, weight in weights.items()}
    encode = partial(tokenizer.encode, add_special_tokens=False)
    prompts = [encode(render(question["messages"], add_generation_prompt=True)).ids for question in questions]
    room = [len(encode(q["answer"]).ids) + 8 if "answer" in q else _ROOM_FOR_STORY for q in questions]
    exact: dict[str, list[bool]] = defaultdict(list)
    mentions: dict[str, list[bool]] = defaultdict(list)
    failures = []
    for question, reply in zip(questions, answers(weights, arch, tokenizer, prompts, room, batch), strict=True):
        if "answer" in question:
            right = reply == question["answer"]
            exact[question["kind"]].append(right)
        else:
            right = all(part in reply for part in question["contains"]) and reply.endswith((".", '"'))
            mentions[question["kind"]].append(right)
        if not right:
            expected = question.get("answer") or ", ".join(question["contains"])
            asked = question["messages"][-1]["content"]
            failures.append({"kind": question["kind"], "asked": asked, "expected": expected, "got": reply})
    return Score(
        exact={kind: (sum(results), len(results)) for kind, results in exact.items()},
        mentions={kind: (sum(results), len(results)) for kind, results in mentions.items()},
        failures=failures,
    )
