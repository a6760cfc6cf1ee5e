"""`hex-llm plan` as a function."""

import json
from typing import Any

from hex_llm.cli import main


def planned(capsys: Any, *argv: str) -> dict[str, Any]:
    """What it prints as JSON."""
    assert main(["plan", *argv, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)
