"""Servers with engines for prompts and engines for answers give the answers of one engine that does all, and move each
block once."""

import contextlib
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.monitoring.page import check_metrics
from tests.server.disaggregated import Counts, checked_server, settled
from tests.server.replicas import sample
from tests.server.servers import RunningServer

BLOCK, CHUNK, UNIT = 8, 256, 64
BLOCK_BYTES = 6 * 2 * 4 * BLOCK * 64 * 4  # layers, keys and values, heads, tokens, their width, float32
FLAGS = (
    "--dtype=float32",
    "--max_model_len=2048",
    "--num_blocks=1500",
    f"--block_size={BLOCK}",
    "--max_decode_seqs=16",
    f"--prefill_len_padding={UNIT}",
    f"--max_num_batched_tokens={CHUNK}",
    "--decode_blocks_padding=1",
    "--enable_prompt_logprobs",
)
PLAIN = ("--enable_chunked_prefill", "--enable_prefix_cache_hbm")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Topology:
    """`tensor` are the devices of an engine for prompts, and those of one for answers."""

    prefill: int
    decode: int
    tensor: tuple[int, int] = (1, 1)
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        tensor = [] if self.tensor == (1, 1) else ["on", *map(str, self.tensor)]
        return "-".join((f"{self.prefill}and{self.decode}", *tensor, *self.flags))

    @property
    def devices(self) -> int:
        return self.prefill * self.tensor[0] + self.decode * self.tensor[1]

    @property
    def all_flags(self) -> tuple[str, ...]:
        prefill, decode = self.tensor
        both = (f"--tensor_parallel_size={prefill}", f"--decode_tensor_parallel_size={decode}")
        return (f"--disagg_topo={self.prefill},{self.decode}", *both[: 1 if prefill == decode else 2], *self.flags)


# What differs otherwise is spread over the topologies: a start takes longer than all the questions.
TOPOLOGIES = (
    Topology(1, 1),
    Topology(2, 1, tensor=(1, 2), flags=("--no-async_scheduling",)),
)
MORE = (
    Topology(2, 1),
    Topology(1, 1, tensor=(2, 1)),
    Topology(1, 2, flags=("--kv_transfer_path=jax",)),
    Topology(3, 1),
    Topology(3, 1, flags=("--no-async_scheduling",)),
    Topology(1, 2),
    Topology(1, 1, tensor=(2, 2)),
    Topology(2, 1, tensor=(2, 2)),
    Topology(3, 1, tensor=(2, 2)),
    Topology(1, 2, tensor=(2, 2)),
    Topology(1, 1, tensor=(2, 2), flags=("--kv_transfer_path=jax",)),
    Topology(2, 1, flags=("--kv_transfer_path=jax",)),
    Topology(1, 1, flags=("--kv_transfer_path=host", "--no-async_scheduling")),
    Topology(1, 1, flags=("--kv_transfer_path=device",)),
    Topology(2, 1, tensor=(2, 2), flags=("--kv_transfer_path=device",)),
    Topology(1, 2, tensor=(1, 2), flags=("--kv_transfer_path=device", "--no-async_scheduling")),
)


def tokens(length: int, number: int) -> list[int]:
    """A prompt that begins as no other does."""
    draw = random.Random(number)
    return [300 + number, *(draw.randrange(300, 2048) for _ in range(length - 1))]


def completion(length: int, number: int, **settings: Any) -> tuple[str, dict[str, Any]]:
    asked = {"prompt": tokens(length, number), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return COMPLETIONS, asked | settings


def chat(text: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0} | settings


DRAWN: dict[str, Any] = {"temperature": 1}
ALL_RULES: dict[str, Any] = DRAWN | {
    "top_p": 0.9, "top_k": 40, "min_p": 0.01, "presence_penalty": 0.5, "frequency_penalty": 0.4,
    "repetition_penalty": 1.2, "logit_bias": {"400": 5, "401": -100}, "min_tokens": 4, "seed": 11,
}  # fmt: skip
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy, less than a block": completion(5, 1),
    "greedy, one token": completion(1, 2),
    "greedy, one block": completion(BLOCK, 3),
    "greedy, a token more than a block": completion(BLOCK + 1, 4),
    "greedy, many blocks exactly": completion(5 * BLOCK, 5),
    "greedy, a chunk exactly": completion(CHUNK, 6),
    "greedy, several chunks": completion(1900, 7),
    "greedy, several chunks, streamed": completion(700, 8, **STREAM),
    "greedy, several chunks of blocks exactly": completion(2 * CHUNK, 9, **STREAM),
    "greedy, up to the end of the context": completion(2040, 10, max_tokens=8),
    "drawn": completion(40, 11, seed=1, **DRAWN),
    "drawn, streamed": completion(41, 12, seed=2, **DRAWN, **STREAM),
    "drawn, several chunks": completion(600, 13, seed=3, **DRAWN),
    "top_p": completion(30, 14, seed=4, top_p=0.7, **DRAWN),
    "top_k": completion(30, 15, seed=5, top_k=9, **DRAWN, **STREAM),
    "presence_penalty": completion(30, 16, presence_penalty=1.5),
    "frequency_penalty": completion(30, 17, frequency_penalty=1.5, **STREAM),
    "repetition_penalty": completion(30, 18, repetition_penalty=1.5),
    "logit_bias": completion(30, 19, logit_bias={"1000": 100, "1001": 99}),
    "all rules": completion(500, 20, **ALL_RULES),
    "all rules, streamed": completion(300, 21, **ALL_RULES, **STREAM),
    "three answers": completion(83, 22, n=3, seed=6, **DRAWN),
    "three answers, streamed": completion(300, 23, n=3, seed=7, **DRAWN, **STREAM),
    "three answers, greedy": completion(20, 24, n=3),
    "logprobs": completion(60, 25, logprobs=3),
    "logprobs, streamed": completion(270, 26, logprobs=2, **STREAM),
    "prompt_logprobs": completion(300, 27, prompt_logprobs=2),
    "prompt_logprobs and logprobs, drawn": completion(20, 28, prompt_logprobs=1, logprobs=1, seed=8, **DRAWN),
    "an answer of one token": completion(30, 29, max_tokens=1),
    "an answer of one token, streamed": completion(300, 30, max_tokens=1, **STREAM),
    "an answer of two tokens": completion(300, 31, max_tokens=2),
    "until it ends by itself": completion(5, 1, max_tokens=100, ignore_eos=False),
    "until it ends by itself, drawn": completion(30, 32, seed=12, max_tokens=100, ignore_eos=False, **DRAWN, **STREAM),
    "two prompts": (COMPLETIONS, {"prompt": [tokens(30, 33), tokens(90, 34)], "max_tokens": 16, "temperature": 0}),
    "chat": chat("Tell me about a fox."),
    "chat, streamed": chat("Tell me about a hen.", **STREAM),
    "chat, drawn, logprobs": chat("Tell me about a cat.", seed=9, logprobs=True, top_logprobs=2, **DRAWN),
    "chat, three answers, streamed": chat("Tell me about a boy.", seed=10, n=3, **DRAWN, **STREAM),
}
STORY: dict[str, Any] = {"prompt": "Once upon a time, there was", "max_tokens": 40, "temperature": 0}


@dataclass(frozen=True)
class Answer:
    """Whole, or put together from a stream."""

    choices: list[dict[str, Any]]
    usage: dict[str, Any]


def ask(server: RunningServer, route: str, body: dict[str, Any]) -> Answer:
    answer = server.post(route, body, timeout=100)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        whole = answer.json()
        return Answer(whole["choices"], whole["usage"])
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", answer.text
    events = [json.loads(line) for line in lines[:-1]]
    return Answer(_joined(events), events[-1]["usage"])


def _joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream: of each its text, what is told of its tokens, and why it ended."""
    joined: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        whole = joined.setdefault(choice["index"], {"text": "", "logprobs": [], "finish_reason": None})
        whole["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        logprobs = choice.get("logprobs") or {}
        whole["logprobs"] += zip(*(logprobs[name] for name in sorted(logprobs) if logprobs[name]), strict=True)
        whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
    return [joined[index] for index in sorted(joined)]


def assert_equal(got: Any, wanted: Any, where: str) -> None:
    """Numbers may differ where sums are rounded elsewhere, and so may the rank of what is unlikely."""
    if isinstance(wanted, float) or where.endswith(": rank"):
        assert got == pytest.approx(wanted, abs=1e-3 if isinstance(wanted, float) or wanted < 10 else 3), where
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for name, value in wanted.items():
            assert_equal(got[name], value, f"{where}: {name}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), where
        for index, value in enumerate(wanted):
            assert_equal(got[index], value, f"{where}[{index}]")
    else:
        assert got == wanted, where


def ask_all(server: RunningServer) -> dict[str, Answer]:
    """All of them at once, which is more than fit."""
    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(lambda case: ask(server, *case), CASES.values()), strict=True))


@dataclass(frozen=True)
class Told:
    """What a server answers, and what it has counted meanwhile."""

    cases: dict[str, Answer]
    stopped: list[Answer]  # by strings and tokens
    several: Answer  # three choices
    long: list[Answer]  # the same prompt again and again
    of_several: Counts
    of_long: Counts  # of the first
    of_again: Counts  # of the others
    of_one: Counts  # of the same for one token


def stops(story: str) -> list[dict[str, Any]]:
    """Questions whose answers end early, in the midst of a story."""
    words = story.split()
    return [
        STORY | {"stop": [f"{words[4]} {words[5]}"]},
        STORY | {"stop": [words[6]], "include_stop_str_in_output": True} | STREAM,
        STORY | {"stop": [words[0]]},  # in the first token, which is another engine's
    ]


def tell(server: RunningServer, *, plain: bool = False) -> Told:
    cases = ask_all(server)
    story = ask(server, COMPLETIONS, STORY | {"return_token_ids": True}).choices[0]
    asked = stops(story["text"])
    asked += [STORY | {"stop_token_ids": [story["token_ids"][place]]} for place in (0, 6)]
    stopped = [ask(server, COMPLETIONS, body) for body in asked]
    counts = [settled(server, plain=plain)]
    several = ask(server, *completion(83, 100, n=3, seed=1, **DRAWN))
    counts.append(settled(server, plain=plain))
    question = completion(1900, 101, max_tokens=8)
    long = [ask(server, *question)]
    counts.append(settled(server, plain=plain))
    long += [ask(server, *question), ask(server, *completion(1900, 101, **STREAM))]
    counts.append(settled(server, plain=plain))
    ask(server, *completion(1900, 101, max_tokens=1))
    counts.append(settled(server, plain=plain))
    each = [now.since(before) for before, now in itertools.pairwise(counts)]
    return Told(cases, stopped, several, long, each[0], each[1], each[2], each[3])


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Told:
    """What one engine that does all answers."""
    with checked_server(None, tmp_path_factory.mktemp("alone") / "log", *FLAGS, *PLAIN, devices=1) as server:
        return tell(server, plain=True)


@contextlib.contextmanager
def serving(topology: Topology, log: Path) -> Iterator[RunningServer]:
    with checked_server(None, log, *FLAGS, *topology.all_flags, devices=topology.devices) as server:
        yield server


def check(server: RunningServer, alone: Told) -> None:
    told = tell(server)
    for name, answer in alone.cases.items():
        assert_equal(told.cases[name].choices, answer.choices, name)
        assert_equal(told.cases[name].usage, answer.usage, name)
    for number, answer in enumerate(alone.stopped):
        assert answer.choices[0]["finish_reason"] == "stop"
        assert_equal(told.stopped[number].choices, answer.choices, f"stop {number}")
    assert_equal(told.several.choices, alone.several.choices, "several")
    assert len({choice["text"] for choice in told.several.choices}) == 3
    for number, answer in enumerate(alone.long):
        assert_equal(told.long[number].choices, answer.choices, f"long {number}")
        # What an engine has of a prompt it does not compute again, whichever engine goes on after that.
        assert told.long[number].usage == answer.usage
        cached = 0 if not number else 1899 // UNIT * UNIT
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == cached

    # Ten blocks that three answers share, and for each the last one, in which they go on.
    assert told.of_several.transfers == 3
    assert told.of_several.num_bytes == (83 // BLOCK + 3) * BLOCK_BYTES
    # Chunk by chunk, then token by token: as many steps as where one engine does it all, so nothing was done twice.
    assert told.of_long == Counts(
        steps=-(-1900 // CHUNK) + 7,
        queries=1900,
        hits=0,
        transfers=1,
        num_bytes=-(-1900 // BLOCK) * BLOCK_BYTES,
    )
    assert told.of_long.steps == alone.of_long.steps
    assert (told.of_again.transfers, told.of_again.num_bytes) == (2, 2 * BLOCK_BYTES)
    assert (told.of_again.steps, told.of_again.hits) == (alone.of_again.steps, alone.of_again.hits)
    assert told.of_one == Counts(steps=1, queries=1900, hits=1899 // BLOCK * BLOCK)
    assert sample(server, "replays_total") == 0
    assert sample(server, "num_preemptions_total") == 0


@pytest.mark.parametrize(
    "topology", [*TOPOLOGIES, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)], ids=str
)
def test_engines_of_two_kinds_answer_as_one_that_does_all(topology, alone, tmp_path):
    with serving(topology, tmp_path / "log") as server:
        check(server, alone)
        if topology == TOPOLOGIES[0]:
            check_bench(server)
            check_metrics(server, "--disagg_topo")


def check_bench(server: RunningServer) -> None:
    command = [
        sys.executable, "-m", "hex_llm.cli", "bench", "serve", f"--base_url={server.url}", "--num_prompts=6",
        "--random_input_len=100", "--random_output_len=4", "--seed=3",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^(.+?): +([\d.]+)$", done.stdout, re.MULTILINE))
    assert rows["KV transfers"] == "6", done.stdout
    assert rows["Failed KV transfers"] == "0"
    blocks = int(rows["Total KV bytes"]) / BLOCK_BYTES
    assert blocks.is_integer()
    assert 6 * 100 / BLOCK < blocks < 6 * 130 / BLOCK
    assert float(rows["KV transfer rate (MB/s)"]) > 0
    assert float(rows["Mean KV transfer, of mean TTFT (%)"]) > 0
    # Nothing, if all blocks were there before the first token.
    assert 0 <= float(rows["Mean KV transfer, not hidden (ms)"]) <= float(rows["Mean KV transfer (ms)"])
    assert "XLA compiles while serving" not in rows
