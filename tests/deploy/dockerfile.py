"""A Dockerfile as values: its stages, each with its instructions."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    base: str
    name: str | None
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [rest for word, rest in self.instructions if word == instruction]

    def one(self, instruction: str) -> str:
        (rest,) = self.all(instruction)
        return rest


def stages(path: Path) -> list[Stage]:
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    found: list[Stage] = []
    for line in re.sub(r"\\\n", "", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base, name or None))
        elif word and found:
            found[-1].instructions.append((word, rest.strip()))
    return found


def words(text: str) -> list[str]:
    """Of an instruction in its form without a shell."""
    return json.loads(text[text.index("[") :])


def variables(texts: list[str]) -> dict[str, str]:
    """What ENV instructions set."""
    return dict(pair.split("=", 1) for text in texts for pair in text.split())
