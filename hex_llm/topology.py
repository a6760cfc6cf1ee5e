"""How many engines compute prompts, and how many go on with them: the value of `--disagg_topo`."""

import re
from dataclasses import dataclass
from typing import Literal

from hex_llm.errors import ConfigError

type Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Engines are numbered: first those of prompts, then the others."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Reads two counts with a comma between."""
        match = re.fullmatch(r"\s*([0-9]{1,4})\s*,\s*([0-9]{1,4})\s*", text)
        if match is None:
            raise ConfigError(f"--disagg_topo={text} is not two counts with a comma between, such as 3,1.")
        found = cls(int(match[1]), int(match[2]))
        if not (found.prefill and found.decode):
            raise ConfigError(f"--disagg_topo={text}: there must be at least 1 engine of either kind.")
        return found

    def __str__(self) -> str:
        return f"{self.prefill},{self.decode}"

    def __len__(self) -> int:
        return self.prefill + self.decode

    def role(self, index: int) -> Role:
        return "prefill" if index < self.prefill else "decode"

    def name(self, index: int) -> str:
        """Engines of a kind count from 0."""
        return f"prefill {index}" if index < self.prefill else f"decode {index - self.prefill}"
