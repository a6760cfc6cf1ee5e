"""Commands in the documents have flags that exist, and print what is shown behind them."""

import pytest

from hex_llm import cli
from hex_llm.config import Config
from hex_llm.flags import FlagParser
from tests.docs.pages import PAGES, Example, commands, examples

# They need no device, no network and no account. `deploy vertex` does, unless it is a dry run.
PRINTING = ("plan", "models", "deploy gke", "deploy ray", "deploy vertex", "version", "flags")

COMMANDS = [
    pytest.param(argv, id=f"{page.name}: {' '.join(argv)}")
    for page in PAGES
    for text in page.read_text().split("```bash\n")[1:]
    for argv in commands(text.partition("```")[0])
    if argv != ["--help"]
]
SHOWN = [
    pytest.param(example, argv, id=f"{example.page}: {' '.join(argv)}")
    for page in PAGES
    for example in examples(page)
    for argv in commands(example.text)
    if " ".join(argv).startswith(PRINTING)
]


class Read(Exception):
    """Flags were read: what the command would do with them is another matter."""


@pytest.mark.parametrize("argv", COMMANDS)
def test_a_command_of_the_documents_has_flags_that_exist(argv, monkeypatch):
    if argv[0] == "serve":
        Config.from_args(argv[1:])
        return
    parse = FlagParser.parse_known_args

    def only_parse(self, *arguments, **keywords):
        _, rest = parse(self, *arguments, **keywords)
        assert [word for word in rest if word.startswith("--")] == []
        raise Read

    monkeypatch.setattr(FlagParser, "parse_known_args", only_parse)
    with pytest.raises(Read):
        cli.main(argv)


def test_commands_of_every_kind_are_found():
    assert {" ".join(argv) for argv in commands("A=1 scripts/hex-llm serve --x | cat && hex-llm plan y # said\n")} == {
        "serve --x",
        "plan y",
    }
    assert list(commands("sudo docker run --rm --name hex-llm hex-llm:tpu \\\n  --model=x")) == [["serve", "--model=x"]]
    assert list(commands("sudo docker exec hex-llm hex-llm bench serve --y")) == [["bench", "serve", "--y"]]
    assert list(commands(".venv/bin/python -m hex_llm.server.api_server --z")) == [["serve", "--z"]]
    assert list(commands("docker push REGISTRY/hex-llm:tpu; pip install hex-llm")) == []
    assert len(COMMANDS) > 50


@pytest.mark.parametrize(("example", "argv"), SHOWN)
def test_a_command_prints_what_is_shown_behind_it(example: Example, argv, capsys):
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    for part in example.shown.split("...\n"):
        assert part in printed
        printed = printed.partition(part)[2]


def test_what_is_shown_is_compared_for_every_command_that_deploys_or_plans():
    assert len(SHOWN) >= 6
