"""The table of metrics in docs/operations.md, and whether a server's /metrics is what it says."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hex_llm.server.metrics import PREFIX
from tests.server.servers import RunningServer
from tests.server.serving import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
_ROW = re.compile(r"^\| `(\w+)` \| (counter|gauge|histogram) \| (.*?) \| (.*?) \| (.*) \|$", re.MULTILINE)
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="')
_PARTS = ("_bucket", "_sum", "_count")  # of a histogram


class Row(NamedTuple):
    kind: str
    labels: frozenset[str]
    flag: str  # that the metric is there with; empty where it always is
    meaning: str


@cache
def rows() -> dict[str, Row]:
    """Every metric of the page, by its whole name."""
    found = _ROW.findall(PAGE.read_text())
    assert len({name for name, *_ in found}) == len(found)
    return {
        PREFIX + name: Row(kind, frozenset(re.findall(r"`(\w+)`", labels)), flag.strip("`"), meaning.replace("`", ""))
        for name, kind, labels, flag, meaning in found
    }


def check_metrics(server: RunningServer, *flags: str) -> None:
    """That /metrics of a server with such flags has what the page says, and nothing else."""
    wait_until(lambda: "engine_steps" in server.get("/metrics").text)  # a second after it was ready
    text = server.get("/metrics").text
    expected = {name: row for name, row in rows().items() if not row.flag or row.flag in flags}
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    assert kinds == {name: row.kind for name, row in expected.items()}
    assert helps == {name: row.meaning for name, row in expected.items()}
    for sample, found in _SAMPLE.findall(text):
        metric = next((name for part in _PARTS if (name := sample.removesuffix(part)) in kinds), sample)
        assert set(_LABEL.findall(found)) - {"le"} == expected[metric].labels, sample


def queryable() -> dict[str, frozenset[str]]:
    """The names that a query can have, each with its labels."""
    names: dict[str, frozenset[str]] = {}
    for name, row in rows().items():
        if row.kind == "histogram":
            names |= {f"{name}_bucket": row.labels | {"le"}, f"{name}_sum": row.labels, f"{name}_count": row.labels}
        else:
            names[name] = row.labels
    return names
