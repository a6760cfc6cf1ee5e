"""Dependencies are not those of advisories that are known here: a list gathered by hand. Where there is a network,
`scripts/audit` asks a database.
"""

import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.test_architecture import PROJECT


class Advisory(NamedTuple):
    package: str
    fixed: Version
    name: str


def read_advisories() -> Iterator[Advisory]:
    for line in (Path(__file__).parent / "advisories.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            package, fixed, name, *about = line.split()
            assert about
            yield Advisory(package, Version(fixed), name)


ADVISORIES = list(read_advisories())
PINNED = dict(line.split("==") for line in (PROJECT / "constraints.txt").read_text().split())
NEEDED = [
    Requirement(each) for each in tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
]


def least(requirement: Requirement) -> Version:
    """The lowest version that pip may take."""
    return min((Version(each.version) for each in requirement.specifier if each.operator == ">="), default=Version("0"))


def test_every_advisory_is_about_something_that_is_used():
    assert {each.package for each in ADVISORIES} <= PINNED.keys()


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda each: f"{each.package} {each.name}")
def test_what_is_pinned_and_what_is_installed_has_the_fault_no_more(advisory):
    assert Version(PINNED[advisory.package]) >= advisory.fixed
    assert Version(version(advisory.package)) >= advisory.fixed


def test_no_version_with_a_known_fault_is_good_enough_for_the_package():
    """Not even where pip is told of no constraints."""
    for requirement in NEEDED:
        fixed = [each.fixed for each in ADVISORIES if each.package == requirement.name.lower()]
        assert least(requirement) >= max(fixed, default=Version("0")), f"{requirement} admits what an advisory is about"
