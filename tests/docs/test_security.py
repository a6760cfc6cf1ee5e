"""docs/security.md says what the settings say, and names tests that are there."""

import re
from pathlib import Path

from hex_llm.config import Config
from hex_llm.flags import flags_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
LIMITS = {flag.name: flag.default for flag in flags_of(Config) if flag.group == "Limits of the server"}


def test_every_limit_is_there_with_its_default():
    found: dict[str, str] = {}
    for flags, values in re.findall(r"^\| [^|`]+ \| (`--.*?`) \| ([\d., ]+) \|$", PAGE, re.MULTILINE):
        found |= zip(re.findall(r"`--(\w+)`", flags), values.split(", "), strict=True)
    switches = {name for name, default in LIMITS.items() if isinstance(default, bool)}
    assert found == {name: str(default) for name, default in LIMITS.items() if name not in switches}


def test_the_tests_that_are_named_are_there():
    for group in re.findall(r"\((`tests/.*?)\)", PAGE, re.DOTALL):
        folder = ROOT
        for name in re.findall(r"`(.*?)`", group):
            path = ROOT / name if name.startswith("tests/") else folder / name
            assert path.exists(), name
            folder = path.parent
