"""F34: bodies that were good once. None makes the server fail or hang."""

import asyncio
import itertools

import httpx
import pytest

from tests.checkpoints import write_llama
from tests.faults.fuzzing import fuzz
from tests.faults.mutations import mutant, mutants
from tests.faults.oracles import check_oracles, take_baseline
from tests.faults.suite import record, sized
from tests.faults.valid_bodies import BODIES, FLAGS
from tests.server.servers import running_server

NUM_BODIES = sized(2000, 100_000)
SAMPLE = 2000  # of them, to see what kinds there are


def test_the_same_number_is_the_same_request():
    for number in range(200):
        assert mutant(number) == mutant(number)
    assert list(itertools.islice(mutants(10**6), 50)) != list(itertools.islice(mutants(10**6, seed=1), 50))


def test_mutations_are_of_many_kinds():
    made = list(mutants(SAMPLE))
    assert len({(each.head, each.body) for each in made}) > 0.9 * SAMPLE
    assert {each.route for each in made if not each.good} == {each.route for each in made if each.good}
    assert 0.02 * SAMPLE < sum(each.good for each in made) < 0.2 * SAMPLE
    assert sum(not each.whole for each in made) > 0.02 * SAMPLE


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    with running_server(write_llama(folder / "model"), folder / "log", *FLAGS) as server:
        yield server


def test_every_body_is_good_before_it_is_mutated(server):
    with httpx.Client(base_url=server.url, timeout=10) as client:
        for route, body in BODIES:
            answer = client.post(route, json=body)
            assert answer.status_code == 200, (body, answer.text)


def test_no_mutated_body_makes_the_server_fail_or_hang(server):
    # A fault is told with its number, and `mutant(number)` is that request again.
    baseline = take_baseline(server)
    findings = asyncio.run(fuzz(server.port, mutants(NUM_BODIES)))
    assert findings.faults == []
    assert findings.num_sent == NUM_BODIES
    assert (findings.server_errors, findings.hangs) == (0, 0)
    # Some are good, some are refused for what they ask, some for what they are.
    assert {"200", "400", "404", "415"} <= findings.statuses.keys()
    assert server.get("/ping", timeout=2).status_code == 200
    check_oracles(server, baseline=baseline, growth_mib=100)
    record(
        "F34",
        f"{NUM_BODIES:,} mutated bodies: {findings.statuses['200']:,} answered 200, the others refused with 4xx, "
        f"0 x 5xx, 0 hangs, the slowest answer after {findings.slowest_s:.1f} s",
    )
