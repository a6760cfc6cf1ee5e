"""docs/add-a-model.md shows code as it is in the tree, and names every part that there is to build with."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from hex_llm.model_fields import Fields
from hex_llm.models.arch import Arch, Kind
from hex_llm.models.read import read_arch
from hex_llm.models.registry import Family
from hex_llm.models.weights import Part
from hex_llm.parallel.sharding import RULES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "add-a-model.md").read_text()
# Text and code take turns.
TEXT_AND_CODE = re.split(r"```python\n|```\n", PAGE)
SHOWN = list(zip(TEXT_AND_CODE[::2], TEXT_AND_CODE[1::2], strict=False))


def named(text: str) -> list[Path]:
    return [ROOT / name for name in re.findall(r"`((?:hex_llm|tests|docs|scripts)/[\w/.]+)`", text)]


def test_the_worked_example_is_the_whole_file():
    text, code = SHOWN[0]
    assert named(text)[-1].read_text() == code


@pytest.mark.parametrize(("text", "code"), SHOWN, ids=[str(named(text)[-1].relative_to(ROOT)) for text, _ in SHOWN])
def test_code_is_in_the_file_that_is_named_before_it(text, code):
    assert code in named(text)[-1].read_text()


def test_every_file_it_names_is_there():
    assert [path for path in named(PAGE) if not path.exists()] == []


def test_all_of_it_takes_less_than_100_lines():
    assert len(PAGE.splitlines()) < 100


def optional(cls: type) -> list[str]:
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    return [field.name for field in fields if field.default is not dataclasses.MISSING]


@pytest.mark.parametrize(
    ("part", "names"),
    {
        "Fields": [name for name, each in vars(Fields).items() if inspect.isfunction(each) and name[0] != "_"],
        "read_arch": [
            name
            for name, each in inspect.signature(read_arch).parameters.items()
            if each.kind is inspect.Parameter.KEYWORD_ONLY
        ],
        "Arch": [*optional(Arch), "query_scale"],
        "Kind": [field.name for field in dataclasses.fields(Kind)],
        "Part": [field.name for field in dataclasses.fields(Part)],
        "dimensions": list(RULES),
        "Family": [field.name for field in dataclasses.fields(Family)],
    }.items(),
)
def test_the_table_names_all_that_a_part_takes(part, names):
    (row,) = [line for line in PAGE.splitlines() if line.startswith((f"| `{part}` |", f"| {part} |"))]
    assert [name for name in names if f"`{name}`" not in row] == []
