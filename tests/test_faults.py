import os
import signal
import subprocess
import sys

import pytest

from hex_llm import faults
from hex_llm.errors import ConfigError


def reached(text: str, point: str, times: int = 10) -> list[int]:
    """The times at which something happens there."""
    fault = faults.parse(text)[point]
    return [time for time in range(1, times + 1) if fault.reach(point)]


@pytest.mark.parametrize(
    ("when", "times"),
    [("", [*range(1, 11)]), ("@3", [3]), ("@3-5", [3, 4, 5]), ("@8-", [8, 9, 10]), ("@1.0", [*range(1, 11)])],
)
def test_a_fault_happens_when_it_is_to(when, times):
    assert reached(f"engine.row:nan{when}", "engine.row") == times


def test_a_share_is_drawn_and_the_same_each_time():
    some = reached("engine.preempt:now@0.1", "engine.preempt", 2000)
    assert 150 < len(some) < 250
    assert some == reached("engine.preempt:now@0.1", "engine.preempt", 2000)


def test_faults_of_several_points_stand_with_commas_between():
    parsed = faults.parse("engine.step:sleep0.5@2, engine.row:nan ,source.write:flip@1-3")
    assert parsed.keys() == {"engine.step", "engine.row", "source.write"}
    assert faults.parse("") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine.stop:raise", "no point 'engine.stop'; there are engine.step"),
        ("engine.step", "at engine.step there may be raise, kill, sleep, not ''"),
        ("engine.step:oom", "not 'oom'"),
        ("engine.step:sleep", "sleep has its seconds"),
        ("engine.step:sleepy", "sleep has its seconds"),
        ("engine.step:sleep-1", "its seconds, 0 or more"),
        ("engine.step:sleepnan", "its seconds, 0 or more"),
        ("engine.step:sleepinf", "its seconds, 0 or more"),
        ("engine.step:sleep1e999", "its seconds, 0 or more"),
        ("engine.step:raise@0", "a number from 1 on"),
        ("engine.step:raise@5-3", "a number from 1 on"),
        ("engine.step:raise@2.5", "a share such as"),
        ("engine.step:raise@x", "a number from 1 on"),
        ("engine.step:raise,engine.step:kill", "engine.step is there twice"),
    ],
)
def test_what_is_no_fault_is_refused_with_what_there_is(text, words):
    with pytest.raises(ConfigError, match=words):
        faults.parse(text)


def run(code: str, text: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {faults.VARIABLE: text}
    command = [sys.executable, "-c", f"from hex_llm import faults\n{code}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_faults_are_those_of_the_environment():
    code = "print([faults.reach('engine.row') for _ in range(3)], faults.reach('engine.preempt'))"
    assert run(code, "engine.row:nan@2").stdout == "[None, 'nan', None] None\n"
    raised = run("faults.reach('engine.step')", "engine.step:raise")
    assert "InjectedFault: HEX_LLM_FAULTS wants engine.step to fail here" in raised.stderr
    assert run("faults.reach('engine.step')", "engine.step:kill").returncode == -signal.SIGKILL
    assert faults.reach("engine.step") is None  # here there are none
