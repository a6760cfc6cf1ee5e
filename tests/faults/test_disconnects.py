"""F11: clients that leave, in whatever phase their request is. All that they held is free at once."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from hex_llm.bench.http_client import HttpClient
from tests.checkpoints import write_llama
from tests.faults.clients import leave, read_tokens, time_to_first_token, until
from tests.faults.oracles import check_oracles, outcomes, take_baseline
from tests.faults.suite import record, sized
from tests.server.load import ABORTED, COMPLETED, Ledger, ask
from tests.server.servers import RunningServer, running_server

SEQUENCES = 8
FLAGS = (f"--max_decode_seqs={SEQUENCES}", "--max_model_len=12288", "--num_blocks=8192", "--block_size=16")
PER_PHASE = sized(10, 200)
WAVE = sized(10, 20)  # that leave at the same time
ABORT_S = sized(5.0, 1.0)  # CI has other tests on its two cores
LONG = {"prompt": [5, 6, 7], "max_tokens": 10_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disconnects")
    model = write_llama(folder / "model", max_position_embeddings=16384)
    with running_server(model, folder / "log", *FLAGS) as server:
        yield server


def blocks_used(server: RunningServer) -> float:
    return server.metrics()['hexllm:kv_blocks{state="used"}']


def in_flight(server: RunningServer) -> float:
    return server.metrics()["hexllm:requests_in_flight"]


class Waves:
    """Clients that come together and leave together, wave after wave; `slowest_s` is how long the server took at most
    to have done with one.
    """

    def __init__(self, server: RunningServer):
        self.server = server
        self.rng = random.Random(0)
        self.slowest_s = 0.0

    async def run(self, body: dict, tokens: Callable[[], int] | None = None, *, others: int = 0) -> None:
        """Clients leave when they have so many tokens, or once the server has all requests; `others` have theirs."""
        left = PER_PHASE
        while left:
            size = min(left, WAVE)
            arrived = asyncio.Event()

            async def all_here(reader: asyncio.StreamReader, arrived: asyncio.Event = arrived) -> None:
                await arrived.wait()
                await asyncio.sleep(self.rng.uniform(0, 0.05))

            clients = []
            for number in range(size):
                when: Callable[[asyncio.StreamReader], Awaitable[None]] = all_here
                if tokens is not None:
                    when = partial(read_tokens, count=tokens())
                clients.append(asyncio.ensure_future(leave(self.server.port, body, when=when, reset=bool(number % 2))))
            if tokens is None:
                await until(lambda size=size: in_flight(self.server) == others + size, 30, "requests did not come")
                arrived.set()
            await asyncio.gather(*clients)
            took = await until(lambda: in_flight(self.server) == others, 30, "a request outlives its client")
            if not others:
                took += await until(lambda: not blocks_used(self.server), 30, "blocks outlive a request")
            self.slowest_s = max(self.slowest_s, took)
            left -= size


async def while_all_slots_are_taken(server: RunningServer, waves: Waves, body: dict) -> None:
    client = HttpClient(server.url, {})
    blockers = [asyncio.create_task(ask(client, Ledger(), LONG)) for _ in range(SEQUENCES)]
    await until(lambda: in_flight(server) == SEQUENCES, 30, "requests did not come")
    await waves.run(body, others=SEQUENCES)
    for blocker in blockers:
        blocker.cancel()
    await asyncio.gather(*blockers, return_exceptions=True)
    await until(lambda: in_flight(server) == 0, 10, "a request outlives its client")


async def leave_in_every_phase(server: RunningServer) -> tuple[Waves, dict[str, dict[str, int]]]:
    """How requests ended by phase, as the server counts them."""
    waves, found = Waves(server), {}
    rng = waves.rng
    told = LONG | {"stream": True, "return_token_ids": True}
    phases: dict[str, Callable[[], Awaitable[None]]] = {
        "queued": lambda: while_all_slots_are_taken(server, waves, LONG | {"stream": True}),
        "prefill": lambda: waves.run(LONG | {"prompt": [7] * 2000, "max_tokens": 2000, "stream": True}),
        "decode": lambda: waves.run(told, lambda: rng.randint(1, 40)),
        "last token": lambda: waves.run(told | {"max_tokens": 12}, lambda: 11),
        "not streamed": lambda: waves.run(LONG),
    }
    for name, phase in phases.items():
        before = outcomes(server.metrics())
        await phase()
        found[name] = dict(outcomes(server.metrics()) - before)
    return waves, found


def test_whoever_leaves_is_counted_as_cancelled_and_leaves_nothing_behind(server):
    baseline = take_baseline(server)
    before = asyncio.run(time_to_first_token(server))
    waves, found = asyncio.run(leave_in_every_phase(server))
    after = asyncio.run(time_to_first_token(server))
    last = found.pop("last token")
    # Whether the last token was on its way already is for nobody to say.
    assert sum(last.values()) == PER_PHASE
    assert last.keys() <= {"cancelled", "completed"}
    assert found.pop("queued") == {"cancelled": PER_PHASE + SEQUENCES}
    assert found == {name: {"cancelled": PER_PHASE} for name in ("prefill", "decode", "not streamed")}
    assert waves.slowest_s < ABORT_S
    check_oracles(server, baseline=baseline)
    share, spare_s = sized((3.0, 0.02), (1.1, 0.002))
    assert after < share * before + spare_s
    record(
        "F11",
        f"{5 * PER_PHASE:,} clients left, half of them with a reset: all cancelled, but for {last.get('completed', 0)} "
        f"that had their last token; after {waves.slowest_s:.2f} s at most nothing of them was left; "
        f"first token after {1000 * before:.0f} ms before, {1000 * after:.0f} ms afterwards",
    )


def test_after_many_long_requests_that_clients_gave_up_the_next_is_answered_soon(server):
    baseline = take_baseline(server)
    count = sized(60, 200)
    ledger = Ledger()

    async def give_up() -> None:
        client = HttpClient(server.url, {})
        await asyncio.gather(*(ask(client, ledger, LONG, abort_after_s=0.5) for _ in range(count)))

    async def ask_next() -> float:
        await give_up()
        return await until(
            lambda: server.post("/v1/completions", {"prompt": "a", "max_tokens": 4}).status_code == 200, 5, "no answer"
        )

    seconds = asyncio.run(ask_next())
    assert ledger.outcomes == {ABORTED: count}
    assert seconds < 5
    ledger.note(COMPLETED)  # the next
    check_oracles(server, ledger, baseline)
    record(
        "F11",
        f"after {count} requests for 10,000 tokens, given up after 0.5 s, the next had its answer in {seconds:.2f} s",
    )
