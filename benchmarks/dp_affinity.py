"""How much of the prefix cache's use is left when two replicas share a multi-turn workload.

    python benchmarks/dp_affinity.py
    python benchmarks/dp_affinity.py --conversations 128 --turns 8 --blocks 1500

Conversations of several turns go through the real router to real engines, whose runner computes nothing: hits depend on
who gets which tokens when, not on what a model makes of them. Each conversation starts with one of a few system
prompts; a turn repeats all that was said, adds a message, and waits for the answer. A fixed number of conversations is
under way at a time, and each engine steps as often as any other.

Compared are a single replica with the memory of both, a single one with the memory of one, two replicas behind the
router, and two by turns, which no server of ours does. The hit rate is the share of all tokens of prompts that engines
found in their caches.
"""

import argparse
import asyncio
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hex_llm.engine.admission import new_request
from hex_llm.engine.client import EngineClient
from hex_llm.engine.engine import Engine
from hex_llm.engine.limits import Limits
from hex_llm.engine.output import Output
from hex_llm.engine.replica import Replica
from hex_llm.engine.request import SamplingParams
from hex_llm.engine.router import Router
from hex_llm.engine.step import Slice, StepResult
from hex_llm.engine.wire import Abort, Add, Ready, Stepped, ToEngine
from hex_llm.errors import HexError
from hex_llm.frames import Decoder, encode

VOCAB = 1000


@dataclass(frozen=True)
class Workload:
    conversations: int = 64
    turns: int = 6
    concurrency: int = 32  # conversations under way at a time
    systems: int = 4  # system prompts
    system_tokens: int = 256
    message_tokens: tuple[int, int] = (16, 160)  # from, to
    answer_tokens: tuple[int, int] = (16, 160)
    blocks: int = 2000  # of a replica
    block_size: int = 32
    seed: int = 0


class _Step:
    def __init__(self, result: StepResult):
        self._result = result

    def is_done(self) -> bool:
        return True

    def read(self) -> StepResult:
        return self._result


class _Runner:
    """Yields tokens that depend on the request and the place, as soon as it is asked."""

    def dispatch(self, step: Sequence[Slice]) -> _Step:
        tokens = [zlib.crc32(f"{s.request.seed} {s.start + s.length}".encode()) % VOCAB for s in step]
        return _Step(StepResult(np.array(tokens, np.int32), np.ones(len(step), bool)))

    def reset(self) -> None:
        """It has nothing to forget."""


class _Replica:
    """An engine, and in the place of a connection a list of messages."""

    def __init__(self, limits: Limits):
        self.engine = Engine(_Runner(), limits)
        self.client = EngineClient()
        self.client._protocol = self  # type: ignore[assignment]
        self._inbox: list[ToEngine] = []

    def send(self, message: Add | Abort) -> None:
        self._inbox += Decoder[ToEngine](ToEngine).feed(encode(message))

    def step(self) -> None:
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            if isinstance(message, Add):
                self.engine.add(message.request)
        outputs = self.engine.step() if self.engine.has_work else []
        begun = [(request_id, 0.0) for request_id in self.engine.take_begun()]
        self.client._take(Stepped(outputs, begun))


class _ByTurns(Router):
    """Sends requests to one replica after the other, whatever they are."""

    def _rank(self, replica: Replica, num_uncached: int) -> tuple[int, ...]:
        return (replica.last_sent,)


class _Conversation:
    """Also the sink of its requests."""

    def __init__(self, number: int, workload: Workload, router: Router, limits: Limits, start: Sequence[int]):
        self._number, self._workload, self._router, self._limits = number, workload, router, limits
        self._rng = random.Random(f"{workload.seed} {number}")
        self._said = list(start)
        self._turn = 0
        self.done = False
        self._ask()

    def _ask(self) -> None:
        self._turn += 1
        self._said += [self._rng.randrange(VOCAB) for _ in range(self._rng.randint(*self._workload.message_tokens))]
        sampling = SamplingParams(max_tokens=self._rng.randint(*self._workload.answer_tokens), ignore_eos=True)
        name = f"{self._number}-{self._turn}"
        self._router.add(new_request(name, self._said, sampling, self._limits, seed=self._number), self)

    def begin(self, waited: float) -> None:
        pass

    def take(self, output: Output) -> None:
        self._said += output.tokens
        if output.finish_reason is not None:
            self.done = self._turn == self._workload.turns
            if not self.done:
                self._ask()

    def fail(self, error: HexError) -> None:
        raise error


@dataclass(frozen=True)
class Result:
    name: str
    hit_rate: float
    requests: tuple[int, ...]  # of each replica
    steps: int  # of the busiest replica


def run(name: str, workload: Workload, kind: type[Router], num_replicas: int, blocks: int) -> Result:
    async def main() -> Result:
        longest = workload.system_tokens + workload.turns * (workload.message_tokens[1] + workload.answer_tokens[1])
        limits = Limits(
            vocab_size=VOCAB,
            max_model_len=longest,
            num_blocks=blocks,
            block_size=workload.block_size,
            max_running=workload.concurrency,
            max_prefills=8,
            step_tokens=1024,
            chunked=True,
            prefix_caching=True,
        )
        router = kind(num_replicas)
        replicas = [_Replica(limits) for _ in range(num_replicas)]
        sent = [0] * num_replicas
        for index, replica in enumerate(replicas):
            replica.client._take(Ready(limits, "none", "none"))
            router.join(index, replica.client)

        def count(replica: int, again: bool) -> None:
            sent[replica] += 1

        router.on_send = count
        rng = random.Random(workload.seed)
        systems = [[rng.randrange(VOCAB) for _ in range(workload.system_tokens)] for _ in range(workload.systems)]
        waiting = [(number, rng.choice(systems)) for number in range(workload.conversations)]
        running: list[_Conversation] = []
        while waiting or running:
            running = [each for each in running if not each.done]
            while waiting and len(running) < workload.concurrency:
                number, start = waiting.pop(0)
                running.append(_Conversation(number, workload, router, limits, start))
            for replica in replicas:
                replica.step()
        stats = [replica.engine.stats() for replica in replicas]
        found, asked = sum(s.total_prefix_hits for s in stats), sum(s.total_prefix_queries for s in stats)
        return Result(name, found / asked, tuple(sent), max(s.total_steps for s in stats))

    return asyncio.run(main())


def compare(workload: Workload) -> list[Result]:
    """The first is what the others are measured by."""
    return [
        run("one replica, memory of two", workload, Router, 1, 2 * workload.blocks),
        run("one replica", workload, Router, 1, workload.blocks),
        run("two replicas, by prefix and load", workload, Router, 2, workload.blocks),
        run("two replicas, by turns", workload, _ByTurns, 2, workload.blocks),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("conversations", "turns", "concurrency", "systems", "system_tokens", "blocks", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Workload, name))
    workload = Workload(**vars(parser.parse_args()))
    print(workload)
    results = compare(workload)
    print(f"\n{'':34} hit rate  of the first  requests      steps")
    for each in results:
        share, requests = each.hit_rate / results[0].hit_rate, " + ".join(map(str, each.requests))
        print(f"{each.name:34} {each.hit_rate:8.3f}  {share:12.3f}  {requests:12}  {each.steps:5}")


if __name__ == "__main__":
    main()
