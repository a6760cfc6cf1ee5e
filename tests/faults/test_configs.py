"""A config.json that cannot be served (F20): exit code 2 or 3 within five seconds, by a line that names the field."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hex_llm.catalog.entry import config_of
from hex_llm.catalog.index import ENTRIES
from hex_llm.errors import CheckpointError
from hex_llm.loader.config_json import parse_config
from tests.checkpoints import write_llama
from tests.faults.starts import End, refused, server_end, slowest
from tests.faults.suite import record, sized

REQUIRED = (
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
GONE = object()
# A config as a whole, or its fields, and what the line that refuses it must say.
BROKEN: dict[str, tuple[Mapping[str, Any] | str, list[str]]] = {
    **{f"no {name}": ({name: GONE}, [f"{name} is missing"]) for name in REQUIRED},
    "a text for a size": ({"hidden_size": "64"}, ["hidden_size is '64'"]),
    "a list for a size": ({"num_hidden_layers": [2]}, ["num_hidden_layers is [2]"]),
    "no heads": ({"num_attention_heads": 0}, ["num_attention_heads is 0"]),
    "fewer than no heads": ({"num_attention_heads": -8}, ["num_attention_heads is -8"]),
    "heads that share unevenly": ({"num_key_value_heads": 3}, ["num_key_value_heads is 3"]),
    "heads that do not divide": ({"hidden_size": 65}, ["hidden_size is 65"]),
    "an unknown architecture": ({"architectures": ["WonderForCausalLM"]}, ["architectures is 'WonderForCausalLM'"]),
    "unknown numbers": ({"quantization_config": {"quant_method": "marvel"}}, ["quant_method is 'marvel'"]),
    "an unknown rope": ({"rope_scaling": {"rope_type": "magic"}}, ["rope_scaling.rope_type is 'magic'"]),
    "a huge context": ({"max_position_embeddings": 10**9}, ["max_position_embeddings is 1000000000", "268435456"]),
    "a huge model": ({"hidden_size": 2**30}, ["hidden_size is 1073741824", "1048576"]),
    "half of it": ('{"architectures": ["Llama', ["not valid JSON"]),
    "nested 100,000 times": ('{"a":' * 100_000, ["nested too deeply"]),
    "a list": ("[1]", ["not a JSON object"]),
    "nothing": ("", ["not valid JSON"]),
    "a web page": ("<html>404</html>", ["web page"]),
}


def written(tmp_path: Path, kind: str) -> Path:
    folder = write_llama(tmp_path / kind.replace(" ", "-"))
    path, (broken, _) = folder / "config.json", BROKEN[kind]
    if isinstance(broken, str):
        path.write_text(broken)
    else:
        fields = json.loads(path.read_text()) | broken
        path.write_text(json.dumps({name: value for name, value in fields.items() if value is not GONE}))
    return folder


def check(kind: str, end: End) -> None:
    assert end.code == 3, end.said
    assert "\n" not in end.said
    for word in ("config.json", *BROKEN[kind][1]):
        assert word in end.said


def test_a_config_that_cannot_be_served_is_refused_by_its_field(tmp_path, capsys):
    ends = {kind: refused(capsys, str(written(tmp_path, kind))) for kind in BROKEN}
    for kind, end in ends.items():
        check(kind, end)
        assert end.within(5)
    record("F20", f"{len(ends)} of {len(BROKEN)} configs are refused with exit 3 and the field's name")


def test_a_whole_server_refuses_it_within_five_seconds(tmp_path):
    kinds = sized(["an unknown architecture", "a huge model"], [*BROKEN])
    ends = {kind: server_end(f"--model={written(tmp_path, kind)}", "--port=0") for kind in kinds}
    for kind, end in ends.items():
        check(kind, end)
        assert end.within(5), f"{end.seconds:.1f} s"
    record("F20", f"{len(ends)} of {len(kinds)} servers end with exit 3, {slowest(ends)}")


def test_the_longest_context_that_can_be_told_is_a_matter_of_memory(tmp_path, capsys):
    """Whose sum is told, and not tried."""
    folder = write_llama(tmp_path / "model", max_position_embeddings=2**28)
    end = refused(capsys, str(folder))
    assert end.code == 4
    assert "--max_model_len" in end.said
    assert end.within(5)
    record("F20", "a context of 2^28 tokens ends with exit 4 and the memory that it would take")


def fields_of(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from fields_of(value, (*above, name))


VALUES = ("x", "", 0, -8, 2**40, 10**400, 1.5, float("inf"), float("nan"), True, None, [], [1], {}, {"a": 1}, GONE)


def test_every_field_of_every_architecture_may_be_anything():
    """It is read, or refused by the field or by the object that it is in: nothing else comes of it."""
    configs = {entry.architecture: config_of(entry) for entry in ENTRIES}
    tried, told = 0, []
    for architecture, whole in configs.items():
        for path in fields_of(whole):
            for value in VALUES:
                config = inner = copy.deepcopy(whole)
                for name in path[:-1]:
                    inner = inner[name]
                inner.pop(path[-1]) if value is GONE else inner.update({path[-1]: value})
                tried += 1
                try:
                    parse_config(config, "config.json")
                except CheckpointError as error:
                    told.append((architecture, path, str(error)))
    for architecture, path, message in told:
        assert any(name in message for name in path), f"{architecture}, {path}: {message}"
        assert "\n" not in message
        assert len(message) < 300
    assert len(told) > tried / 4
    values = f"{tried} values in place of the fields of {len(configs)} architectures"
    record("F20", f"of {values}, {len(told)} are refused by name, and the rest is read")
