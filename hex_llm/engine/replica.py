"""One of several engines as the router sees it: whether it can be reached, and how much it has to do."""

from collections.abc import Sequence
from dataclasses import fields, replace

from hex_llm.engine.affinity import Belief
from hex_llm.engine.block_pool import BlockKey
from hex_llm.engine.client import EngineClient
from hex_llm.engine.output import Stats
from hex_llm.engine.request import Request
from hex_llm.engine.wire import Alive, Ready


class Replica:
    """`num_outstanding` are the tokens that it still has to compute for its requests, as far as anybody can know."""

    def __init__(self, index: int, name: str):
        self.index = index
        self.name = name  # in logs
        self.client: EngineClient | None = None  # while it is connected
        self.num_joined = 0  # times that it has connected
        self.ready: Ready | None = None  # what it said last, also where it is gone since
        self.belief: Belief | None = None  # while it takes requests
        self.num_requests = 0
        self.num_outstanding = 0
        self.num_kv = 0  # tokens that its requests will have at the end, where it goes on with others' prompts
        self.last_sent = 0  # the number of the last request that was sent to it

    @property
    def is_up(self) -> bool:
        return self.belief is not None

    def num_uncached(self, request: Request, keys: Sequence[BlockKey]) -> int:
        """How many tokens it would have to compute before the next one of the answer."""
        assert self.ready is not None
        assert self.belief is not None
        if request.sampling.prompt_logprobs is not None and not request.output:  # then all of them are wanted
            return request.num_known
        return request.num_known - self.belief.match(keys) * self.ready.limits.block_size

    def fullness(self, num_tokens: int) -> tuple[float, ...]:
        """Where it goes on with others' prompts, if it took so many tokens more: the more it is full, be it of tokens
        or of sequences, the later it lets a request in, and the slower it is. Other HTTP processes may use it, too.
        """
        assert self.ready is not None
        limits, alive = self.ready.limits, self.client and self.client.alive
        used, running = self.num_kv, self.num_requests
        if alive is not None:
            used = max(used, alive.stats.blocks_used * limits.block_size)
            running = max(running, alive.stats.running + alive.stats.coming + alive.stats.waiting)
        fullest = max((used + num_tokens) / limits.kv_tokens, (running + 1) / limits.max_running)
        return fullest, self.num_outstanding, self.last_sent


class Load:
    """What one request weighs on the replica that has it.

    Its prompt counts until the first token of the answer is there. Of the answer as many tokens count as answers had
    of late, for as long as it may still become so long: an answer of which much is there may yet be at its beginning.
    """

    __slots__ = ("num_answer", "num_kv", "num_prompt", "replica")

    def __init__(self, replica: Replica, num_prompt: int, num_answer: int, num_kv: int = 0):
        self.replica = replica
        self.num_prompt = num_prompt
        self.num_answer = num_answer
        self.num_kv = num_kv
        replica.num_kv += num_kv
        replica.num_requests += 1
        replica.num_outstanding += num_prompt + num_answer

    def move(self, num_left: int) -> None:
        """A token has come, after which `num_left` may follow."""
        if self.num_prompt:
            self.replica.num_outstanding -= self.num_prompt
            self.num_prompt = 0
        if num_left < self.num_answer:
            self.replica.num_outstanding += num_left - self.num_answer
            self.num_answer = num_left

    def end(self) -> None:
        self.replica.num_requests -= 1
        self.replica.num_kv -= self.num_kv
        self.replica.num_outstanding -= self.num_prompt + self.num_answer


_COUNTS = tuple(each.name for each in fields(Stats))


def add_up(signs: Sequence[Alive]) -> Alive:
    """The signs of life of several engines as those of one."""
    return Alive(
        Stats(**{name: sum(getattr(each.stats, name) for each in signs) for name in _COUNTS}),
        sum(each.late_compiles for each in signs),
        sum(each.late_compile_seconds for each in signs),
        sum(each.invariant_violations for each in signs),
    )


def last_words(sign: Alive) -> Alive:
    """What of the last sign of life stays true of an engine that has gone: what it has counted."""
    now = [name for name in _COUNTS if not name.startswith("total")]
    return Alive(
        replace(sign.stats, **dict.fromkeys(now, 0)),
        sign.late_compiles,
        sign.late_compile_seconds,
        sign.invariant_violations,
    )
