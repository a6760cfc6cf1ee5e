"""docs/operations.md has the numbers that the code has."""

import re
from pathlib import Path

from hex_llm.config import Config
from hex_llm.deploy.manifest import _END_S, _LEAVE_S
from hex_llm.errors import StartError
from hex_llm.process import ENGINE_DIED, ENGINE_HUNG
from hex_llm.server.state import Phase

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def section(name: str) -> str:
    return PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]


def test_every_exit_code_is_there():
    codes = {StartError.exit_code, *(kind.exit_code for kind in StartError.__subclasses__())}
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", section("Exit codes"), re.MULTILINE)}
    assert listed == {0, *codes, ENGINE_DIED, ENGINE_HUNG}


def test_the_times_of_draining_are_those_of_flags_and_manifests():
    text = section("Draining")
    assert f"`--drain_timeout_s` ({Config().drain_timeout_s:g} s)" in text
    assert f"`--drain_timeout_s` + {_LEAVE_S} s for `preStop` + {_END_S} s" in text
    assert f"preStop: {{sleep: {{seconds: {_LEAVE_S}}}}}" in text


def test_every_state_of_a_server_is_there():
    (states,) = re.findall(r"`status` \((.*?)\)", section("Health routes and probes"))
    assert re.findall(r"`(\w+)`", states) == list(Phase)
