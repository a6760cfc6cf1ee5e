"""docs/deploy.md shows what the commands print."""

import re
from pathlib import Path

from hex_llm import cli

PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()


def block(kind: str) -> str:
    (text,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    return text


def test_the_program_on_the_page_is_what_the_command_prints(capsys):
    (command,) = re.findall(r"^hex-llm (deploy vertex .* --dry-run)$", PAGE, re.MULTILINE)
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out == block("python")


def test_the_manifest_on_the_page_is_part_of_what_the_command_prints(capsys):
    (command,) = re.findall(r"^hex-llm (deploy gke .*?) \|", PAGE, re.MULTILINE)
    assert cli.main(command.split()) == 0
    assert block("yaml") in capsys.readouterr().out
