import asyncio
import itertools

import httpx
import pytest

from tests.checkpoints import write_llama
from tests.server.fuzzing import fuzz
from tests.server.mutations import mutant, mutants
from tests.server.refusals import check_ledger
from tests.server.servers import running_server
from tests.server.valid_bodies import BODIES, FLAGS

NUM_BODIES = 2000


def test_the_same_number_is_the_same_request():
    for number in range(200):
        assert mutant(number) == mutant(number)
    assert list(itertools.islice(mutants(10**6), 50)) != list(itertools.islice(mutants(10**6, seed=1), 50))


def test_mutations_are_of_many_kinds():
    made = list(mutants(NUM_BODIES))
    assert len({(each.head, each.body) for each in made}) > 0.9 * NUM_BODIES
    assert {each.route for each in made if not each.good} == {each.route for each in made if each.good}
    assert 0.02 * NUM_BODIES < sum(each.good for each in made) < 0.2 * NUM_BODIES
    assert sum(not each.whole for each in made) > 0.02 * NUM_BODIES


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
    findings = asyncio.run(fuzz(server.port, mutants(NUM_BODIES)))
    assert findings.faults == []
    assert findings.num_sent == NUM_BODIES
    assert (findings.server_errors, findings.hangs) == (0, 0)
    # Some are good, some are refused for what they ask, some for what they are.
    assert {"200", "400", "404", "415"} <= findings.statuses.keys()
    check_ledger(server.metrics())
    assert server.get("/ping").status_code == 200
