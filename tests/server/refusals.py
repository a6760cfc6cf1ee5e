"""What every refusal of the server has in common, whatever was wrong."""

import json
import re
import tempfile
from typing import Any

MAX_BYTES = 8 * 2**10

# A traceback, an address, a path of the machine.
_LEAK = re.compile(
    r"0x[0-9a-fA-F]{6,}|File \"|Traceback|/home|site-packages|\.py\b|hex_llm/|" + re.escape(tempfile.gettempdir())
)


def error_of(body: bytes) -> dict[str, Any]:
    """The error object in a body, checked for its form."""
    assert len(body) <= MAX_BYTES
    text = body.decode()
    assert not _LEAK.search(text), text
    answer = json.loads(text)
    assert list(answer) == ["error"]
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["param"], str | None)
    assert isinstance(error["code"], str | None)
    return error


def check_ledger(metrics: dict[str, float]) -> None:
    """Every request that came in has ended in one way, and none for a fault of ours."""
    assert metrics["hexllm:internal_errors_total"] == 0
    received = _sum(metrics, "hexllm:requests_received_total")
    ended = _sum(metrics, "hexllm:requests_total")
    assert received == ended + metrics["hexllm:requests_in_flight"]


def _sum(metrics: dict[str, float], name: str) -> float:
    return sum(value for sample, value in metrics.items() if sample.partition("{")[0] == name)
