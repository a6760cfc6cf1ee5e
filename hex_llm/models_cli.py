"""`hex-llm models`: the models that are known by name, and how to serve them."""

import json
from collections.abc import Sequence
from typing import Any

from hex_llm.catalog.entry import Entry, Recommendation
from hex_llm.catalog.index import ENTRIES, find, near
from hex_llm.config import Config
from hex_llm.errors import ConfigError
from hex_llm.flags import FlagParser, flags_of


def main(argv: Sequence[str]) -> None:
    parser = FlagParser("hex-llm models", "List the models that are known by name, or show one.", flags=())
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="A model's name shows it; other words list the models that have them."
    )
    parser.add_argument("--json", action="store_true", help="Print all that is known, as JSON.")
    arguments = parser.parse_args(argv)
    one = find(" ".join(arguments.words))
    chosen = [one] if one else _matching(arguments.words)
    if arguments.json:
        print(json.dumps([_facts(entry) for entry in chosen], indent=2))
    else:
        print(page(one) if one else table(chosen))


def _matching(words: Sequence[str]) -> list[Entry]:
    """The models in whose name or architecture all the words are."""
    chosen = [
        entry
        for entry in ENTRIES
        if all(word.lower() in f"{entry.name} {entry.architecture}".lower() for word in words)
    ]
    if chosen:
        return chosen
    meant = " or ".join(near(" ".join(words)))
    hint = f"did you mean {meant}?" if meant else "`hex-llm models` lists them all."
    raise ConfigError(f"No model is called {' '.join(words)[:200]!r}; {hint}")


def table(chosen: Sequence[Entry]) -> str:
    """A line for each model."""
    rows = [("MODEL", "PARAMETERS", "CONTEXT", "ARCHITECTURE")]
    rows += [(entry.name, rounded(entry.parameters), str(entry.context), entry.architecture) for entry in chosen]
    name, parameters, context, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{a:<{name}}  {b:>{parameters}}  {c:>{context}}  {d}" for a, b, c, d in rows)


def rounded(parameters: int) -> str:
    """As people say it: 8.03B, 135M."""
    return f"{parameters / 1e9:.2f}B" if parameters >= 995e6 else f"{parameters / 1e6:.0f}M"


def page(entry: Entry) -> str:
    """All that a person wants to know of a model."""
    text = entry.text
    lines = [
        entry.name,
        "",
        f"  architecture  {entry.architecture}",
        f"  parameters    {entry.parameters:,}, about {entry.weight_bytes / 2**30:.1f} GiB in {entry.bits} bits",
        f"  context       {entry.context:,} tokens",
        f"  vocabulary    {text['vocab_size']:,} tokens",
        f"  layers        {text['num_hidden_layers']}, {text['hidden_size']} wide",
        f"  heads         {text['num_attention_heads']} of {text['head_dim']},"
        f" {text['num_key_value_heads']} for keys and values",
    ]
    lines += [
        "",
        "To begin with, on machines of several kinds:",
    ]
    for each in entry.recommended:
        lines += ["", f"On {_machines(each)}:", f"  {command(entry, each)}"]
    lines += [
        "",
        "In its shape, on random weights, without its files:",
        f"  hex-llm serve --model={entry.name} --load_format=dummy --max_model_len={min(entry.context, 4096)}",
    ]
    return "\n".join(lines)


def _machines(recommended: Recommendation) -> str:
    hosts = recommended.flags.get("num_hosts", 1)
    return f"{hosts} machines {recommended.machine}" if hosts > 1 else recommended.machine


def command(entry: Entry, recommended: Recommendation) -> str:
    """The command line that serves a model on a machine."""
    by_name = {flag.name: flag for flag in flags_of(Config)}
    shown = [by_name[name].show(value) for name, value in recommended.flags.items()]
    return " ".join(["hex-llm serve", f"--model={entry.name}", *shown])


def _facts(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "parameters": entry.parameters,
        "bits": entry.bits,
        "context": entry.context,
        "architecture": entry.architecture,
        "recommended": [
            {"machine": each.machine, "flags": dict(each.flags), "command": command(entry, each)}
            for each in entry.recommended
        ],
        "config": entry.config,
    }
