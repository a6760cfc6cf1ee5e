"""Two hosts of a replica, each a process: steps arrive as they were sent, and one that goes takes the other along."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hex_llm.runner.followers import Followers, Replica
from hex_llm.runner.step_wire import AdapterPart, Forget, Step
from tests.runner.replica_host import END_S, as_text, load_as_text, packed_step, rows_of

SCRIPT = Path(__file__).parent / "replica_host.py"


class Hosts:
    """Starts hosts of one replica, and ends them."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, role: str, silence: float = 20.0) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, str(SCRIPT), role, self.address, str(silence)]
        self.started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return self.started[-1]

    def pair(self, silence: float = 20.0) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
        """A leader that waits in a step, and its follower."""
        leader, follower = self.start("leader", silence), self.start("follower", silence)
        assert leader.stdout.readline() == follower.stdout.readline() == "joined\n"
        leader.stdin.write("wait\n")
        leader.stdin.flush()
        return leader, follower


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    for each in hosts.started:
        each.kill()
        each.communicate()


def end_of(process: subprocess.Popen[str], *, within: float = 30) -> tuple[int, str]:
    """Its exit code, and what it said last."""
    _, errors = process.communicate(timeout=within)
    return process.returncode, errors


def test_steps_arrive_as_they_were_sent_and_an_end_is_no_loss(hosts):
    leader, follower = hosts.start("leader"), hosts.start("follower")
    assert follower.stdout.readline() == "joined\n"
    assert [follower.stdout.readline() for _ in range(3)] == [as_text(packed_step(n)) + "\n" for n in range(3)]
    leader.communicate("end\n", timeout=END_S / 2)  # the leader does not wait for longer than the follower takes
    assert end_of(follower) == (0, "")
    assert leader.returncode == 0


def test_adapters_arrive_as_they_were_sent_and_in_order_with_the_steps(hosts):
    hosts.start("leader with adapters")
    follower = hosts.start("follower")
    assert follower.stdout.readline() == "joined\n"
    expected = []
    for number, adapter in enumerate((1, 2, 1)):
        expected += [load_as_text(2, rows_of(adapter).tobytes()), as_text(packed_step(number))]
    expected.append(load_as_text(1, rows_of(3).tobytes()))
    assert [follower.stdout.readline() for _ in expected] == [line + "\n" for line in expected]


def test_a_follower_that_cannot_load_an_adapter_ends_the_leader(hosts):
    leader, follower = hosts.start("leader with adapters"), hosts.start("follower without memory")
    code, errors = end_of(leader)
    assert code == 70
    assert errors.endswith("has failed in a step: MemoryError: no room\n")
    assert end_of(follower)[0] == 70


class Line:
    """In place of a connection to the one host that follows; one message at a time goes over it."""

    def __init__(self):
        self.sent: list = []
        self.during: Callable[[], None] = lambda: None  # what else happens while the second is sent
        self._lock = threading.Lock()
        self.followers = Followers(Replica(0, 2, "tcp:127.0.0.1:0", b"key"), failed=lambda code: None)
        self.followers._peers[1] = self
        self.followers.wait(0)

    def send(self, message) -> None:
        with self._lock:
            self.sent.append(message)
            if len(self.sent) == 2:
                self.during()


def test_a_step_waits_for_one_part_of_an_adapter():
    line = Line()
    stepping = threading.Thread(target=lambda: line.followers.send(packed_step(0)))

    def begin_a_step() -> None:
        stepping.start()
        while line.followers._between_steps.is_set():  # it has not come to where it waits for the part
            time.sleep(0.001)

    line.during = begin_a_step
    line.followers.share({0: rows_of(0), 1: rows_of(1)})
    stepping.join()
    assert [type(each) for each in line.sent] == [AdapterPart, AdapterPart, Step, *[AdapterPart] * 4]


def test_adapters_that_nobody_has_any_more_are_forgotten_by_all_hosts():
    line = Line()
    first, second = (line.followers.share({0: rows_of(0), 1: rows_of(1)}) for _ in range(2))
    line.sent.clear()
    del second
    third = line.followers.share({0: rows_of(0), 1: rows_of(3)})
    forget, *parts = line.sent
    assert forget == Forget(2)
    assert {part.number for part in parts} == {third.number} == {first.number + 2}
    assert b"".join(part.data for part in parts) == rows_of(3).tobytes()


def test_a_follower_that_is_killed_ends_a_leader_that_waits_in_a_step(hosts):
    leader, follower = hosts.pair()
    follower.kill()
    code, errors = end_of(leader, within=15)
    assert code == 70
    assert re.fullmatch(r"hex-llm: host 1 of replica 0 at 127\.0\.0\.1:\d+ is lost: .+\.\n", errors)


def test_a_leader_that_is_killed_ends_its_followers(hosts):
    leader, follower = hosts.pair()
    leader.kill()
    code, errors = end_of(follower, within=15)
    assert code == 70
    assert errors == f"hex-llm: host 0 of replica 0 at {hosts.address} is lost: its connection has ended.\n"


@pytest.mark.parametrize("stopped", ["leader", "follower"])
def test_a_host_that_stands_still_ends_the_other(hosts, stopped):
    leader, follower = hosts.pair(silence=1.5)
    still, other = (leader, follower) if stopped == "leader" else (follower, leader)
    still.send_signal(signal.SIGSTOP)
    code, errors = end_of(other)
    assert code == 70
    assert "is lost: nothing has been heard of it for 1.5 s." in errors


def test_hosts_that_say_nothing_but_that_they_live_stay(hosts):
    leader, follower = hosts.pair(silence=4)  # longer than a busy machine lets a thread wait
    time.sleep(6)
    assert leader.poll() is None
    assert follower.poll() is None


def test_a_follower_that_cannot_start_ends_the_leader_with_its_reason_and_its_code(hosts):
    leader = hosts.start("leader")
    hosts.start("follower without a model")
    output, errors = leader.communicate(timeout=30)
    assert leader.returncode == 3
    assert "host 1 of replica 0 at 127.0.0.1:" in errors
    assert errors.endswith("could not start: there is no model.\n")
    assert output.endswith("failed 3\n")


def test_a_host_that_does_not_come_is_named(hosts):
    code, errors = end_of(hosts.start("leader alone"))
    assert code == 1
    assert "StartError: Of the 2 hosts of replica 0, those of rank 1 have not connected to" in errors


def test_a_host_with_another_key_does_not_get_in(hosts):
    leader, stranger = hosts.start("leader"), hosts.start("stranger")
    code, errors = end_of(stranger)
    assert code == 1
    assert "another HEXLLM_CLUSTER_KEY" in errors or "ended before all had come" in errors
    assert leader.poll() is None
