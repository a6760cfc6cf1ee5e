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
from tests.faults.accelerator import AS_ON_AN_ACCELERATOR, IN_WORDS
from tests.faults.clients import Times, stream
from tests.faults.oracles import check_oracles, memory, outcomes, take_baseline
from tests.faults.pinging import share
from tests.faults.suite import record, sized
from tests.server.load import ABORTED, COMPLETED, Ledger, ask
from tests.server.servers import RunningServer, running_server

NUM_SLOW, NUM_NORMAL = sized((6, 4), (100, 28))
STALL_S = sized(2, 60)  # --write_timeout_s; the server looks four times in it
COMPARED_S = sized(3, 20)
TOKENS = 100
LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}  # takes longer than the comparison
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
    with running_server(model, folder / "log", *FLAGS, **AS_ON_AN_ACCELERATOR) as server:
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
        body = orjson.dumps(LONG | {"stream": True})
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


async def read_normally(server: RunningServer) -> tuple[float, Ledger]:
    """The median time for a token, of clients that ask one thing after the other."""
    times, ledger = Times(), Ledger()
    client = HttpClient(server.url, {})
    end = time.monotonic() + COMPARED_S

    async def one() -> None:
        while time.monotonic() < end:
            await stream(client, {"prompt": [5, 6, 7], "max_tokens": TOKENS}, times, ledger)

    await asyncio.gather(*(one() for _ in range(NUM_NORMAL)))
    client.close()
    return share(times.per_token_s, 0.5), ledger


async def read_beside_patient_ones(server: RunningServer) -> float:
    """The same, where the engine has as much to do for clients that want their answers whole."""
    client = HttpClient(server.url, {})
    patient = [asyncio.create_task(ask(client, Ledger(), LONG)) for _ in range(NUM_SLOW)]
    seconds, _ = await read_normally(server)
    assert not any(each.done() for each in patient)
    for each in patient:
        each.cancel()
    await asyncio.gather(*patient, return_exceptions=True)
    return seconds


def test_slow_readers_cost_the_others_nothing_and_are_cut_off(server):
    beside_patient = asyncio.run(read_beside_patient_ones(server))
    baseline = take_baseline(server)
    readers = SlowReaders(server, NUM_SLOW)
    try:
        beside, ledger = asyncio.run(read_normally(server))
        grown = memory(server)["front"] - baseline.processes["front"].memory_mib
        readers.wait(1.25 * STALL_S + 60)
    finally:
        readers.close()
    assert ledger.outcomes.keys() == {COMPLETED}
    assert beside < sized(3.0, 1.05) * beside_patient  # CI has other tests on its two cores
    assert grown < 100
    # The time runs from the moment when nothing more can be sent, which comes some seconds after the beginning.
    cut = readers.cut_after_s
    assert len(cut) == NUM_SLOW
    assert min(cut) >= STALL_S
    assert max(cut) < 1.25 * STALL_S + 30
    ledger.outcomes[ABORTED] += NUM_SLOW
    check_oracles(server, ledger, baseline, growth_mib=100)
    assert (outcomes(server.metrics()) - baseline.outcomes)["cancelled"] == NUM_SLOW
    record(
        "F12",
        f"{NUM_SLOW} readers of a byte a second beside {NUM_NORMAL} others, {IN_WORDS}: a token every "
        f"{1000 * beside:.1f} ms for these, {1000 * beside_patient:.1f} ms beside as many that do not stream; "
        f"{grown:+.0f} MiB; with --write_timeout_s={STALL_S} the slow ones were cut off {min(cut):.0f} to "
        f"{max(cut):.0f} s after they asked",
    )
