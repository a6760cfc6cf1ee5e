"""A runner whose answers can be checked without a model.

Its cache holds a number per token where a model's holds keys and values. The number of a token depends on the token,
the adapter, whether it is above the rope's switch, and the numbers of the tokens before that it sees, read back through
the page table as attention would; the next token is a digest of all the numbers that the last one sees. A lost, shared
or stale block, or a slot with another adapter, therefore changes the output, and any schedule that is right gives the
very same output as any other.

Like the device it runs behind: what a step needs is taken from the requests when it is dispatched, and with
`lazy=True` nothing is computed before a step is read. Memory that a step under way may still touch is guarded.
It fails where a test wants it to: `fault(where)` is called in "dispatch", in "read", and in "read end", when all that
a read does has been done, and may raise.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hex_llm.engine.admission import new_request
from hex_llm.engine.carrier import Carrier
from hex_llm.engine.engine import Engine
from hex_llm.engine.handover import Porter
from hex_llm.engine.limits import Limits
from hex_llm.engine.output import Output
from hex_llm.engine.request import Request, SamplingParams, TokenLogprobs
from hex_llm.engine.step import Logprobs, Slice, StepResult
from tests.engine.fake_carrier import FakeCarrier, source_of

VOCAB = 40
TOP = 3


@dataclass(frozen=True)
class Model:
    """A token sees the last `reach`, itself too. In a sequence above the switch all tokens are long."""

    reach: int | None = None
    rope_switch: int | None = None

    def is_long(self, num_tokens: int) -> bool:
        return self.rope_switch is not None and num_tokens > self.rope_switch

    def number(self, numbers: np.ndarray, position: int, token: int, adapter: str, long: bool) -> int:
        """What the cache holds for a token, given what it holds for those before."""
        seen = numbers[self.first(position) : position]
        return zlib.crc32(seen.tobytes(), zlib.crc32(f"{adapter} {long} {token}".encode())) & 0x7FFFFFFF

    def next_token(self, numbers: np.ndarray, position: int, seed: int) -> int:
        """The token that follows the one at a position."""
        return zlib.crc32(numbers[self.first(position) : position + 1].tobytes(), seed) % VOCAB

    def first(self, position: int) -> int:
        return 0 if self.reach is None else max(position + 1 - self.reach, 0)


PLAIN = Model()


def logprobs_of(number: int) -> TokenLogprobs:
    """Made-up figures about a token: they depend on nothing but the cell before it."""
    top = tuple(((number + i) % VOCAB, -float(number % 97 + i)) for i in range(TOP))
    return TokenLogprobs(-float(number % 89), number % 7 + 1, top)


def alone(request: Request, model: Model = PLAIN) -> list[int]:
    """The output of a request that has the device to itself, and never meets a scheduler."""
    numbers, num_prompt = np.zeros(len(request.prompt) + request.max_output, np.int64), len(request.prompt)
    tokens, num_computed, long = list(request.prompt), 0, False
    while len(tokens) < len(numbers):
        if model.is_long(len(tokens)) and not long:
            num_computed, long = 0, True
        for position in range(num_computed, len(tokens)):
            numbers[position] = model.number(numbers, position, tokens[position], request.adapter, long)
        num_computed = len(tokens)
        tokens.append(model.next_token(numbers, num_computed - 1, request.seed))
        if tokens[-1] in request.stop_ids:
            break
    return tokens[num_prompt:]


def logprobs_alone(request: Request, tokens: Sequence[int], model: Model = PLAIN) -> list[TokenLogprobs]:
    """What is said of each of `tokens` but the first."""
    numbers = np.zeros((2, len(tokens)), np.int64)  # in a short sequence, and in a long one
    for long, row in enumerate(numbers):
        for position, token in enumerate(tokens[:-1]):
            row[position] = model.number(row, position, token, request.adapter, bool(long))
    told_in = [int(model.is_long(max(len(request.prompt), position + 1))) for position in range(len(tokens) - 1)]
    return [logprobs_of(int(numbers[long, position])) for position, long in enumerate(told_in)]


@dataclass(frozen=True)
class Row:
    """A slice as it was when it was dispatched."""

    slot: int
    seed: int
    adapter_slot: int
    long: bool
    fresh: bool
    start: int
    tokens: list[int]
    length: int
    num_old_blocks: int
    new_blocks: list[int]
    samples: bool
    poisoned: bool
    wants_prompt_logprobs: bool


class FakeStep:
    def __init__(self, runner: "FakeRunner", rows: list[Row], touched: set[int], written: set[int]):
        self.runner, self.rows, self.touched, self.written = runner, rows, touched, written
        self.result: StepResult | None = None

    def is_done(self) -> bool:
        return self.runner.num_looks <= 0

    def read(self) -> StepResult:
        self.runner.fault("read")
        if self.result is None:
            self.result = self.runner.execute(self.rows)
        self.runner.fault("read end")
        assert self.runner.unread[0] is self, "steps are read in the order of their dispatch"
        self.runner.unread.pop(0)
        return self.result


class FakeRunner:
    def __init__(self, limits: Limits, *, lazy: bool = True):
        self.limits = limits
        self.model = Model(limits.reach, limits.rope_switch)
        self.lazy = lazy
        self.unread: list[FakeStep] = []
        self.steps: list[list[tuple[str, int, int]]] = []  # (request, start, length) of all there ever were
        self.num_tokens = 0  # computed so far
        self.fault: Callable[[str], None] = lambda where: None
        self.poison: dict[str, int] = {}  # request -> the token of its output that comes out as NaN
        self.reset()
        self.adapters = ["", *["nobody's"] * limits.num_adapters]  # by slot
        self.received: set[int] = set()  # blocks that were ever copied in
        self.num_looks = 0  # at a step before it is done
        self.order: list[str] = []  # what it was given to do

    def reset(self) -> None:
        limits = self.limits
        self.unread.clear()
        # The device's memory, touched by `execute` alone.
        pages = -(-limits.max_model_len // limits.block_size)
        self.cache = np.full((limits.num_blocks, limits.block_size), -1, np.int64)
        self.page_table = np.zeros((limits.max_running, pages), np.int64)
        self.last_token = np.full(limits.max_running, -1)
        # What the host has told the device of each slot: whose it is, and how many blocks.
        self.told: dict[int, tuple[str, int]] = {}

    def dispatch(self, step: Sequence[Slice]) -> FakeStep:
        self.check(step)
        self.fault("dispatch")
        touched, written, rows = set(), set(), []
        for piece in step:
            request, size = piece.request, self.limits.block_size
            end = piece.start + piece.length
            own = {request.blocks[i] for i in range(piece.start // size, -(-end // size))}
            written |= own
            touched |= set(request.blocks[self.limits.first_block(piece.start) : -(-end // size)])
            rows.append(
                Row(
                    slot=request.slot,
                    seed=request.seed,
                    adapter_slot=request.adapter_slot,
                    long=request.is_long,
                    fresh=piece.fresh,
                    start=piece.start,
                    tokens=request.tokens(piece.start, end),
                    length=piece.length,
                    num_old_blocks=piece.num_old_blocks,
                    new_blocks=request.blocks[piece.num_old_blocks :],
                    samples=piece.samples,
                    poisoned=self.poison.get(request.id) == len(request.output) + request.num_in_flight - 1,
                    wants_prompt_logprobs=request.sampling.prompt_logprobs is not None,
                )
            )
            self.told[request.slot] = (request.id, len(request.blocks))
        self.order.append("step")
        pending = FakeStep(self, rows, touched, written)
        self.unread.append(pending)
        self.steps.append([(piece.request.id, piece.start, piece.length) for piece in step])
        self.num_tokens += sum(piece.length for piece in step)
        if not self.lazy:
            pending.result = self.execute(rows)
        return pending

    def load_adapter(self, slot: int, staged: str) -> None:
        assert 1 <= slot <= self.limits.num_adapters
        self._catch_up()
        self.adapters[slot] = staged
        self.order.append(f"load {staged}")

    part_blocks = 2

    def copy_out(self, blocks: Sequence[int]) -> np.ndarray:
        assert 0 < len(blocks) <= self.part_blocks
        assert all(0 < block < self.limits.num_blocks for block in blocks)
        self._catch_up()
        self.order.append("copy")
        return self.cache[list(blocks)]

    def copy_in(self, blocks: Sequence[int], pages: np.ndarray) -> None:
        assert len(blocks) == len(pages)
        assert all(0 < block < self.limits.num_blocks for block in blocks)
        touched = set().union(*(pending.touched for pending in self.unread))
        assert not touched & set(blocks), "a step under way looks at blocks that are written to"
        self._catch_up()
        self.cache[list(blocks)] = pages
        self.received |= set(blocks)

    def _catch_up(self) -> None:
        """The device does things in their order."""
        for pending in self.unread:
            pending.result = pending.result or self.execute(pending.rows)

    def check(self, step: Sequence[Slice]) -> None:
        """Asserts what a real runner relies upon."""
        limits, size = self.limits, self.limits.block_size
        assert step
        assert len({piece.request.slot for piece in step}) == len(step), "a slot is in a step twice"
        assert sum(piece.length for piece in step) <= limits.step_tokens
        assert sum(not piece.decodes for piece in step) <= limits.max_prefills
        kinds = [0 if piece.decodes else 1 if piece.length == 1 else 2 for piece in step]
        assert kinds == sorted(kinds), "decodes come first, then the short, then the long"
        if not limits.chunked:
            decodes = [piece.decodes and piece.samples for piece in step]
            assert all(decodes) or not any(decodes), "a step both prefills and decodes"
        touched = set().union(*(pending.touched for pending in self.unread))
        written = set().union(*(pending.written for pending in self.unread))
        for piece in step:
            request, end = piece.request, piece.start + piece.length
            known = len(request.tokens(piece.start, end))
            assert known == piece.length or (known == 0 and piece.decodes), "a token is known to nobody"
            assert 0 <= request.slot < limits.max_running
            assert end <= limits.max_model_len
            assert end <= len(request.blocks) * size
            assert self.adapters[request.adapter_slot] == request.adapter, "its slot has another adapter"
            assert all(0 < block < limits.num_blocks for block in request.blocks[limits.first_block(piece.start) :])
            told = (None, 0) if piece.fresh else self.told[request.slot]
            assert told == (None if piece.fresh else request.id, piece.num_old_blocks)
            if piece.fresh:
                came = request.blocks[piece.start // size - (piece.start % size == 0)] in self.received
                assert piece.start % size == 0 or came, "only whole blocks are shared"
                found, rest = request.blocks[: piece.start // size], request.blocks[piece.start // size :]
                assert not written.intersection(found), "a block was found before the step that fills it was read"
            else:
                rest = request.blocks[piece.num_old_blocks :]
            assert not touched.intersection(rest), "a block was given away while a step under way may touch it"

    def execute(self, rows: Sequence[Row]) -> StepResult:
        tokens, size = np.full(len(rows), -1, np.int32), self.limits.block_size
        finite = np.zeros(len(rows), bool)
        about, of_prompts = [], []
        for index, row in enumerate(rows):
            table = self.page_table[row.slot]
            if row.fresh:
                table[:] = 0
                self.last_token[row.slot] = -1
            table[row.num_old_blocks : row.num_old_blocks + len(row.new_blocks)] = row.new_blocks
            inputs = row.tokens or [int(self.last_token[row.slot])]
            end = row.start + row.length
            cells = self.cache[table[: -(-end // size)]].reshape(-1)[:end]
            for position, token in enumerate(inputs, row.start):
                adapter = self.adapters[row.adapter_slot]
                cells[position] = self.model.number(cells, position, token, adapter, row.long)
                self.cache[table[position // size], position % size] = cells[position]
            about.append(logprobs_of(int(cells[-1])))
            of_prompts.append(_stack([logprobs_of(int(c)) for c in cells[row.start :]]))
            if row.samples:
                tokens[index] = self.model.next_token(cells, end - 1, row.seed)
                finite[index] = not row.poisoned
                self.last_token[row.slot] = tokens[index]
        of_prompts = [p if row.wants_prompt_logprobs else None for p, row in zip(of_prompts, rows, strict=True)]
        return StepResult(tokens, finite, _stack(about), of_prompts)


def _stack(values: list[TokenLogprobs]) -> Logprobs:
    return Logprobs(
        own=np.array([v.logprob for v in values], np.float32),
        rank=np.array([v.rank for v in values], np.int32),
        top_ids=np.array([[i for i, _ in v.top] for v in values], np.int32),
        top=np.array([[p for _, p in v.top] for v in values], np.float32),
    )


def make_limits(**changes) -> Limits:
    defaults = {
        "vocab_size": VOCAB,
        "max_model_len": 64,
        "num_blocks": 65,
        "block_size": 4,
        "max_running": 8,
        "max_prefills": 4,
        "step_tokens": 64,
        "chunked": True,
        "prefix_caching": True,
    }
    return Limits(**(defaults | changes))


def make_engine(
    *,
    max_in_flight: int = 1,
    rebuilds: bool = False,
    lazy: bool = True,
    porter: Porter | None = None,
    carrier: Carrier | None = None,
    **changes,
) -> tuple[Engine, FakeRunner]:
    """Where it has adapters and no carrier is given, they come as `bring` says."""
    limits = make_limits(**changes)
    runner = FakeRunner(limits, lazy=lazy)
    if limits.num_adapters and carrier is None:
        carrier = FakeCarrier()
    options = {"max_in_flight": max_in_flight, "rebuilds": rebuilds, "porter": porter, "carrier": carrier}
    return Engine(runner, limits, **options), runner


def bring(engine: Engine) -> None:
    """Has the adapters come that were asked for."""
    carrier = engine._adapters._carrier
    if isinstance(carrier, FakeCarrier):
        carrier.bring_all()
        while carrier.said:
            engine.hear(carrier.said.popleft())


_ids = iter(range(10**9))


def make_request(prompt: Sequence[int], max_tokens: int = 4, *, id: str = "", **changes) -> Request:
    """A request with an id of its own; `changes` are those of SamplingParams and of new_request."""
    given = {name: changes.pop(name) for name in ("adapter", "caller", "cache_salt", "end_ids") if name in changes}
    sampling = SamplingParams(max_tokens=max_tokens, **changes)
    # Refusals are the engine's to make, so the request itself is made under limits that allow anything.
    limits = make_limits(max_model_len=2**30, num_blocks=2**30, vocab_size=2**30, num_adapters=1)
    given["adapter_source"] = source_of(given.get("adapter", ""))
    return new_request(id or f"r{next(_ids)}", list(prompt), sampling, limits, **given)


def drain(engine: Engine, most: int = 5000) -> list[Output]:
    """Steps until nothing is left to do."""
    outputs = []
    while engine.has_work:
        bring(engine)
        outputs += engine.step()
        engine.check()
        most -= 1
        assert most, "the engine does not come to an end"
    engine.check()
    return outputs


def run(engine: Engine, *requests: Request) -> list[Output]:
    for request in requests:
        engine.add(request)
    return drain(engine)


def outputs_of(outputs: Iterable[Output], request: Request) -> list[int]:
    """The tokens that a request was told of."""
    return [token for output in outputs if output.request_id == request.id for token in output.tokens]
