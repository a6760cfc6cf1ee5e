"""What devices send each other in a compiled program, read from its text."""

import math
import re
from dataclasses import dataclass

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

# `%name = type kind(%operand, ...), attributes`. Where it runs beside other work it is two, of which one is the end.
_LINE = re.compile(
    rf'^\s*(?:ROOT )?%?[\w.-]+ = (?P<type>[^%"]*?) (?P<kind>{"|".join(_KINDS)})(?P<start>-start)?\(', re.M
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<shape>[\d,]*)\]")
_NAME = re.compile(r'op_name="([^"]*)"')
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_NAMED = re.compile(r"replica_groups=[@\w]*mesh\S*\[([^\]]*)\] \{([^}]*)\}")


@dataclass(frozen=True, slots=True)
class Collective:
    """One of them, as it stands in the text: in the body of a loop it may run many times."""

    kind: str  # as XLA says: all-reduce, all-gather, ...
    bytes: int  # of the whole array: what is summed on every device, put together, or taken apart
    dtype: str  # as XLA says: bf16, f32, ...; several are joined by +
    group: int  # devices that take part together
    name: str  # of the operation it comes from, with the functions around it: "jit(forward)/jit(layer)/psum"

    @property
    def sent(self) -> float:
        """Bytes that a device has to send at the least: on a ring, or any network where no switch adds."""
        share = (self.group - 1) / self.group
        match self.kind:
            case "all-reduce":
                return 2 * share * self.bytes
            case "collective-permute" | "collective-broadcast":
                return float(self.bytes)
            case _:
                return share * self.bytes


def collectives(hlo: str) -> list[Collective]:
    """All of them, in the order of the text, which is that of `jax.stages.Compiled.as_text()`."""
    return [_collective(match, hlo[match.start() : _end_of_line(hlo, match.end())]) for match in _LINE.finditer(hlo)]


def _collective(match: re.Match[str], line: str) -> Collective:
    kind, arrays = match["kind"], list(_ARRAY.finditer(match["type"]))
    if match["start"] and kind == "all-gather":
        arrays = arrays[len(arrays) // 2 :]  # before the results stand the operands
    elif match["start"] and kind == "collective-permute":
        arrays = arrays[1:2]
    group = _group(line)
    size = sum(map(_bytes, arrays)) * (group if kind == "reduce-scatter" else 1)
    name = _NAME.search(line)
    dtypes = dict.fromkeys(array["dtype"] for array in arrays)
    return Collective(kind, size, "+".join(dtypes), group, name[1] if name else "")


def _group(line: str) -> int:
    if "source_target_pairs" in line:
        return 2
    if match := _LISTED.search(line):
        return len(match[1].split(","))
    if match := _COUNTED.search(line):
        return int(match[1])
    if match := _NAMED.search(line):  # mesh['a'=2,'b'=4] {'b'}
        sizes = dict(axis.strip().split("=") for axis in match[1].split(","))
        return math.prod(int(sizes[axis.strip()]) for axis in match[2].split(","))
    raise ValueError(f"how many devices take part is not said as expected: {line[:300]}")


def _bytes(array: re.Match[str]) -> int:
    size = math.prod(int(number) for number in array["shape"].split(",") if number)
    return -(-size * int(array["bits"] or 8) // 8)


def _end_of_line(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end
