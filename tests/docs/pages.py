"""What the documents tell a reader to type, and what they say comes of it."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SERVER = ["-m", "hex_llm.server.api_server"]
_IMAGE = "hex-llm:"


class Example(NamedTuple):
    """A command's text, and the block right behind it, with its kind."""

    page: str
    text: str
    kind: str
    shown: str


def examples(page: Path) -> Iterator[Example]:
    """The blocks of shell commands that are followed by another block."""
    blocks = list(_BLOCK.finditer(page.read_text()))
    for block, after in itertools.pairwise(blocks):
        if block[1] == "bash" and not page.read_text()[block.end() : after.start()].strip():
            yield Example(page.name, block[2], after[1], after[2])


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each `hex-llm` in a text for the shell; whoever starts the server otherwise runs `serve`."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set("();<>|&"):
                yield from _of_hex_llm(command)
                command = []
            else:
                command.append(word)


def _of_hex_llm(words: list[str]) -> Iterator[list[str]]:
    for place, word in enumerate(words):
        before, after = words[:place], words[place + 1 :]
        inside = before[-3:] == ["docker", "exec", "hex-llm"]  # the container that the pages call so
        if Path(word).name == "hex-llm" and (inside or all(re.match(r"\w+=", setting) for setting in before)):
            yield after
        elif words[place : place + 2] == _SERVER:
            yield ["serve", *after[1:]]
        elif "run" in before and Path(word).name.startswith(_IMAGE):
            yield ["serve", *after]
