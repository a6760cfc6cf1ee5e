"""F34: bytes that are not HTTP, or nearly are. The server answers or closes, and goes on as before."""

import asyncio

import pytest

from tests.checkpoints import write_llama
from tests.faults.oracles import check_oracles, take_baseline
from tests.faults.raw_http import fuzz, talk, talks
from tests.faults.suite import record, sized
from tests.faults.valid_bodies import FLAGS
from tests.server.servers import running_server

NUM_TALKS = sized(600, 20_000)
# What never comes is given up soon, so that a hang can be told from patience.
HASTY = ("--head_timeout_s=1", "--body_timeout_s=1", "--keep_alive_timeout_s=1")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw_http")
    with running_server(write_llama(folder / "model"), folder / "log", *FLAGS, *HASTY) as server:
        yield server


def test_the_same_number_is_the_same_talk():
    for number in range(100):
        assert talk(number) == talk(number)
    assert len({talk(number).pieces for number in range(600)}) > 500


def test_no_bytes_make_the_server_fail_or_hang(server):
    baseline = take_baseline(server)
    findings = asyncio.run(fuzz(server.port, talks(NUM_TALKS)))
    assert findings.faults == []
    assert findings.num_talks == NUM_TALKS
    assert {200, 400, 404, 408, 431} <= findings.statuses.keys()
    assert server.get("/ping", timeout=2).status_code == 200
    assert "Traceback" not in server.log.read_text()
    check_oracles(server, baseline=baseline, growth_mib=100)
    answers = findings.statuses.total()
    record(
        "F34",
        f"{NUM_TALKS:,} connections with broken HTTP: {answers:,} answers, {findings.unanswered:,} closed without one, "
        f"0 x 5xx, 0 hangs, the longest {findings.slowest_s:.1f} s",
    )
