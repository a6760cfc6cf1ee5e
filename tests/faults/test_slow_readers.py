"""F12: clients that hardly read, beside others. The others notice nothing, and the slow ones are cut off in time."""

import asyncio
import contextlib
import select
import socket
import threading
import time

import orjson
import pytest

from hex_llm.bench.http_client import HttpClient
from tests.checkpoints import write_llama
from tests.faults.clients import Times, stream
from tests.faults.oracles import check_oracles, memory, outcomes, take_baseline
from tests.faults.pinging import share
from tests.faults.suite import record, sized
from tests.server.load import COMPLETED, Ledger
from tests.server.servers import RunningServer, running_server

NUM_SLOW, NUM_NORMAL = sized((6, 4), (100, 28))
STALL_S = sized(2, 60)  # --write_timeout_s; the server looks four times in it
COMPARED_S = sized(3, 20)
TOKENS = 100
# Every piece of a stream has the model's name in it: with a long one, buffers of the kernel are soon full.
MODEL = "m" * 8000
FLAGS = (
    f"--served_model_name={MODEL}",
    f"--write_timeout_s={STALL_S}",
    f"--max_decode_seqs={NUM_SLOW + NUM_NORMAL}",
    "--max_model_len=4096",
    "--num_blocks=32768",
    "--block_size=16",
    "--disable_log_requests",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow_readers")
    model = write_llama(folder / "model", max_position_embeddings=4096)
    with running_server(model, folder / "log", *FLAGS) as server:
        yield server


class SlowReaders:
    """Each asks for a long stream, and reads a byte of it every second. `cut_after_s` is when each was cut off."""

    def __init__(self, server: RunningServer, count: int):
        self.cut_after_s: list[float] = []
        self._clients = [self._connect(server) for _ in range(count)]
        self._started = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @staticmethod
    def _connect(server: RunningServer) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        body = orjson.dumps({"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True})
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        client.setblocking(False)
        return client

    def _read(self) -> None:
        left = {client.fileno(): client for client in self._clients}
        poll = select.poll()
        for number in left:
            poll.register(number, 0)  # errors are told without being asked for
        while left and not self._stop.wait(1):
            for number, _ in poll.poll(0):
                self.cut_after_s.append(time.monotonic() - self._started)
                poll.unregister(number)
                del left[number]
            for client in left.values():
                with contextlib.suppress(BlockingIOError):
                    client.recv(1)

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for client in self._clients:
            client.close()


def read_normally(server: RunningServer, clients: int, seconds: float) -> tuple[float, Ledger]:
    """The median time for a token, of clients that ask one thing after the other for so long."""
    times, ledger = Times(), Ledger()

    async def one(client: HttpClient, end: float) -> None:
        while time.monotonic() < end:
            await stream(client, {"prompt": [5, 6, 7], "max_tokens": TOKENS}, times, ledger)

    async def all_clients() -> None:
        client = HttpClient(server.url, {})
        end = time.monotonic() + seconds
        await asyncio.gather(*(one(client, end) for _ in range(clients)))
        client.close()

    asyncio.run(all_clients())
    return share(times.per_token_s, 0.5), ledger


def test_slow_readers_cost_the_others_nothing_and_are_cut_off(server):
    everybody_normal, _ = read_normally(server, NUM_SLOW + NUM_NORMAL, COMPARED_S)
    baseline = take_baseline(server)
    readers = SlowReaders(server, NUM_SLOW)
    try:
        beside, ledger = read_normally(server, NUM_NORMAL, COMPARED_S)
        grown = memory(server)["front"] - baseline.processes["front"].memory_mib
        readers.wait(1.25 * STALL_S + 60)
    finally:
        readers.close()
    assert ledger.outcomes.keys() == {COMPLETED}
    # As if the slow ones were like the others. CI has other tests on its two cores: there it says little.
    assert beside < sized(3.0, 1.05) * everybody_normal
    assert grown < 100
    # The time runs from the moment when nothing more can be sent, which comes some seconds after the beginning.
    cut = readers.cut_after_s
    assert len(cut) == NUM_SLOW
    assert min(cut) >= STALL_S
    assert max(cut) < 1.25 * STALL_S + 30
    check_oracles(server, baseline=baseline, growth_mib=100)
    assert (outcomes(server.metrics()) - baseline.outcomes)["cancelled"] == NUM_SLOW
    record(
        "F12",
        f"{NUM_SLOW} readers of a byte a second beside {NUM_NORMAL} others: a token every {1000 * beside:.1f} ms for "
        f"these, {1000 * everybody_normal:.1f} ms where all read alike; {grown:+.0f} MiB; with --write_timeout_s="
        f"{STALL_S} the slow ones were cut off {min(cut):.0f} to {max(cut):.0f} s after they had asked",
    )
