"""The processes of a server's engines: all of a replica or none, and again after a while."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from hex_llm.config import Config
from hex_llm.launch import fleet as fleet_module
from hex_llm.launch.fleet import Fleet
from hex_llm.launch.placement import place, place_engines
from hex_llm.launch.task import EngineTask, Task
from hex_llm.process import ENGINE_DIED


class Process:
    def __init__(self, host: int, task: Task):
        self.host = host
        self.task = task
        self.engine = task.engines[0]
        self.code: int | None = None
        self.told = False
        self.slow = False  # to end when it is told to

    def poll(self) -> int | None:
        return self.code

    def end(self) -> None:
        self.told = True
        if self.code is None and not self.slow:
            self.code = -9


class Hosts:
    """A launcher whose processes end when a test says so."""

    def __init__(self) -> None:
        self.started: list[Process] = []
        self.fails: Exception | None = None
        self.closed = False
        self._port = 1000

    def addresses(self, host, number):
        self._port += number
        return [f"10.0.0.{host}:{self._port + index}" for index in range(number)]

    def pages_address(self, host):
        (address,) = self.addresses(host, 1)
        return f"tcp:{address}"

    def start(self, host, task, environment):
        if self.fails:
            raise self.fails
        assert environment == {"KEY": "k"}
        self.started.append(Process(host, task))
        return self.started[-1]

    def close(self):
        self.closed = True

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.started if process.code is None]


@dataclasses.dataclass
class Clock:
    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fleet_module, "time", clock)
    return clock


def make(hosts: Hosts, **placement: int) -> Fleet:
    placed = place(**{"tensor": 1, "data": 1, "num_hosts": 1, "local_devices": 8} | placement)
    return Fleet(Config(), hosts, placed, ["unix:/a", "unix:/b"], {"KEY": "k"})


def of_two_kinds(hosts: Hosts, topology: str = "1,1", **settings: Any) -> Fleet:
    config = Config(disagg_topo=topology, **settings)
    return Fleet(config, hosts, place_engines(config, num_hosts=1, local_devices=8), ["unix:/a"], {"KEY": "k"})


def seconds_until_started(hosts: Hosts, fleet: Fleet, clock: Clock) -> float:
    before, started = len(hosts.started), clock.now
    while len(hosts.started) == before:
        clock.now += 0.125
        fleet.poll()
        assert clock.now - started < 100, "it is not started again"
    return clock.now - started


def test_every_replica_gets_a_process_that_knows_its_part(clock):
    hosts = Hosts()
    make(hosts, tensor=2, data=2)
    assert [(each.host, each.engine.replica, each.task.devices) for each in hosts.started] == [
        (0, 0, (0, 1)),
        (0, 1, (2, 3)),
    ]
    assert {(each.task.fronts, each.task.num_ranks, each.task.num_devices) for each in hosts.started} == {
        (("unix:/a", "unix:/b"), 1, 2)
    }


def test_the_hosts_of_a_replica_share_addresses_and_no_other_replica_has_them(clock):
    hosts = Hosts()
    make(hosts, tensor=4, data=2, num_hosts=4, local_devices=2)
    tasks = [each.task for each in hosts.started]
    assert [(each.host, each.engine.replica, each.task.rank) for each in hosts.started] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)
    ]  # fmt: skip
    assert tasks[0].steps == tasks[1].steps
    assert tasks[0].steps.startswith("tcp:10.0.0.0:")
    assert tasks[2].coordinator == tasks[3].coordinator
    assert tasks[2].coordinator.startswith("10.0.0.2:")
    assert len({address for task in tasks for address in (task.steps, task.coordinator)}) == 4


def test_a_replica_that_ends_is_started_again_after_longer_and_longer_pauses(clock):
    hosts = Hosts()
    fleet = make(hosts, data=2)
    pauses = []
    for _ in range(9):
        hosts.alive[-1].code = -9
        fleet.poll()
        pauses.append(seconds_until_started(hosts, fleet, clock))
        clock.now += 10
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert {each.engine.replica for each in hosts.started[2:]} == {1}
    assert fleet.exit_code is None
    clock.now += 301
    hosts.alive[-1].code = ENGINE_DIED
    fleet.poll()
    assert seconds_until_started(hosts, fleet, clock) == 1


def test_when_one_host_of_a_replica_ends_the_others_are_ended_and_all_start_anew(clock):
    hosts = Hosts()
    fleet = make(hosts, tensor=4, data=2, num_hosts=4, local_devices=2)
    hosts.started[3].code = ENGINE_DIED
    fleet.poll()
    assert hosts.started[2].told
    assert len(hosts.alive) == 2
    seconds_until_started(hosts, fleet, clock)
    assert [each.host for each in hosts.alive] == [0, 1, 2, 3]
    assert hosts.alive[3].task.steps != hosts.started[3].task.steps


def test_a_replica_is_not_started_while_a_process_of_it_still_has_its_devices(clock):
    hosts = Hosts()
    fleet = make(hosts, tensor=4, data=2, num_hosts=4, local_devices=2)
    hosts.started[2].slow = True
    hosts.started[3].code = ENGINE_DIED
    for _ in range(20):
        clock.now += 1
        fleet.poll()
    assert len(hosts.started) == 4
    hosts.started[2].code = -9
    fleet.poll()
    assert len(hosts.started) == 6


def test_a_replica_that_hangs_can_be_ended_and_comes_back(clock):
    hosts = Hosts()
    fleet = make(hosts, data=2)
    fleet.end(1)
    assert [each.told for each in hosts.started] == [False, True]
    fleet.poll()
    seconds_until_started(hosts, fleet, clock)
    assert [each.engine.replica for each in hosts.alive] == [0, 1]


@pytest.mark.parametrize(("code", "expected"), [(-9, ENGINE_DIED), (0, ENGINE_DIED), (3, 3), (70, 70)])
def test_the_end_of_the_only_replica_is_the_fleets(clock, code, expected):
    hosts = Hosts()
    fleet = make(hosts)
    hosts.started[0].code = code
    for _ in range(100):
        clock.now += 1
        fleet.poll()
    assert fleet.exit_code == expected
    assert len(hosts.started) == 1


def test_a_replica_that_refuses_its_first_start_is_the_end_and_one_that_refuses_a_later_one_is_not(clock):
    hosts = Hosts()
    fleet = make(hosts, data=2)
    hosts.alive[1].code = -11
    fleet.poll()
    seconds_until_started(hosts, fleet, clock)
    hosts.alive[1].code = 4
    fleet.poll()
    assert fleet.exit_code is None
    hosts.alive[0].code = 4
    fleet.poll()
    assert fleet.exit_code == 4


def test_a_start_that_cannot_be_made_is_tried_again(clock):
    hosts = Hosts()
    fleet = make(hosts, data=2)
    hosts.alive[1].code = -9
    fleet.poll()
    hosts.fails = OSError("no memory")
    clock.now += 1.5
    fleet.poll()
    hosts.fails = None
    assert seconds_until_started(hosts, fleet, clock) == 2


def test_nothing_is_started_again_while_the_server_ends(clock):
    hosts = Hosts()
    fleet = make(hosts, data=2)
    hosts.alive[1].code = 0
    fleet.poll(restart=False)
    clock.now += 100
    fleet.poll(restart=False)
    assert len(hosts.started) == 2
    assert fleet.exit_code is None


def test_in_the_end_processes_have_a_while_and_are_then_ended(clock):
    hosts = Hosts()
    fleet = make(hosts, data=2)
    hosts.alive[0].code = 0
    started = clock.now
    fleet.close()
    assert 5 <= clock.now - started < 6
    assert hosts.started[1].code == -9
    assert hosts.closed


def test_a_first_start_that_cannot_be_made_leaves_nothing_behind(clock):
    class Full(Hosts):
        def start(self, host, task, environment):
            if self.started:
                raise OSError("no memory")
            return super().start(host, task, environment)

    hosts = Full()
    with pytest.raises(OSError, match="no memory"):
        make(hosts, data=2)
    assert not hosts.alive
    assert hosts.closed


def test_engines_of_two_kinds_each_have_the_settings_and_devices_of_theirs_and_an_address_for_blocks(clock):
    hosts = Hosts()
    of_two_kinds(hosts, "2,1", tensor_parallel_size=1, decode_tensor_parallel_size=2)
    assert [(each.engine.replica, each.task.num_devices, each.task.devices) for each in hosts.started] == [
        (0, 1, (2,)), (1, 1, (3,)), (2, 2, (0, 1))
    ]  # fmt: skip
    engines = [engine for each in hosts.started for engine in each.task.engines]
    assert [engine.devices for engine in engines] == [None] * 3  # all that its process sees
    check_two_kinds(engines)


def check_two_kinds(engines: Sequence[EngineTask]) -> None:
    """Two for prompts with a device each, and one for answers with two."""
    assert [engine.replica for engine in engines] == [0, 1, 2]
    assert [engine.config.tensor_parallel_size for engine in engines] == [1, 1, 2]
    assert [engine.config.role(engine.replica) for engine in engines] == ["prefill", "prefill", "decode"]
    assert len({engine.pages for engine in engines}) == 3
    assert all(engine.pages.startswith("tcp:10.0.0.0:") for engine in engines)


def in_one_process(hosts: Hosts) -> Fleet:
    sizes = {"tensor_parallel_size": 1, "decode_tensor_parallel_size": 2}
    return of_two_kinds(hosts, "2,1", kv_transfer_path="device", **sizes)


def test_engines_that_share_a_process_each_have_devices_of_their_own_of_all_that_it_sees(clock):
    hosts = Hosts()
    in_one_process(hosts)
    (process,) = hosts.started
    assert (process.host, process.task.num_devices, process.task.devices) == (0, 4, None)
    assert [engine.devices for engine in process.task.engines] == [(2,), (3,), (0, 1)]
    check_two_kinds(process.task.engines)


def test_the_end_of_a_process_of_several_engines_is_the_end_of_the_fleet(clock, caplog):
    hosts = Hosts()
    fleet = in_one_process(hosts)
    hosts.started[0].code = -9
    fleet.poll()
    assert fleet.exit_code == ENGINE_DIED
    assert "The process of the engines was ended by signal 9." in caplog.text
    assert len(hosts.started) == 1


@pytest.mark.parametrize("replica", [0, 2])
def test_an_engine_that_hangs_is_ended_with_those_that_share_its_process(clock, replica):
    hosts = Hosts()
    in_one_process(hosts).end(replica)
    assert not hosts.alive


def test_engines_that_all_do_all_have_no_address_for_blocks(clock):
    hosts = Hosts()
    make(hosts, data=2)
    assert {each.engine.pages for each in hosts.started} == {""}


@pytest.mark.parametrize(("number", "name"), [(0, "prefill 0"), (1, "decode 0")])
@pytest.mark.parametrize("code", [-9, 0, ENGINE_DIED])
def test_the_only_engine_of_a_kind_is_started_again_at_another_address(clock, caplog, number, name, code):
    hosts = Hosts()
    fleet = of_two_kinds(hosts)
    hosts.started[number].code = code
    fleet.poll()
    assert f"The process of {name} " in caplog.text
    assert seconds_until_started(hosts, fleet, clock) == 1
    assert fleet.exit_code is None
    assert hosts.started[2].engine.replica == number
    assert hosts.started[2].engine.pages != hosts.started[number].engine.pages


@pytest.mark.parametrize("number", [0, 1])
def test_an_engine_of_either_kind_that_refuses_its_first_start_is_the_end(clock, number):
    hosts = Hosts()
    fleet = of_two_kinds(hosts)
    hosts.started[number].code = 3
    fleet.poll()
    assert fleet.exit_code == 3


def test_a_start_of_an_engine_that_cannot_be_made_names_it(clock, caplog):
    hosts = Hosts()
    fleet = of_two_kinds(hosts)
    hosts.started[1].code = -9
    fleet.poll()
    hosts.fails = OSError("no memory")
    clock.now += 1.5
    fleet.poll()
    assert "Decode 0 does not start (no memory); once more in 2 s." in caplog.text
