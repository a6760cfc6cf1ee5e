"""The pages for those who come from Hex-LLM and from vLLM: flags are what they are said to be, in the real parser."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from hex_llm.bench.serving_flags import Options, parse_settings
from hex_llm.config import RETIRED, VLLM, Config, config_parser
from hex_llm.errors import ConfigError
from hex_llm.flags import Flag, FlagParser, flags_of
from tests.monitoring.page import rows
from tests.test_config import DOCUMENTED

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / f"migrating-from-{name}.md").read_text() for name in ("hex-llm", "vllm")}
FLAGS = {flag.name: flag for flag in flags_of(Config)}
# Of programs other than ours.
OTHERS = {"--ipc", "--shm-size"}
# Flags that cannot be given alone, or not any value.
COMPANIONS = {"lora_modules": ["--enable_lora"]}
SAMPLES = {
    "block_size": "16",
    "decode_blocks_padding": "64",
    "disagg_topo": "1,2",
    "kv_cache_dtype": "int8",
    "lora_modules": "a=b/c",
    "max_logprobs": "5",
    "max_num_batched_tokens": "512",
    "quantization": "int8",
    "worker_distributed_method": "ray",
}


class Row(NamedTuple):
    page: str
    spelling: str
    here: str
    remarks: str


def _rows() -> list[Row]:
    found = []
    for page, text in PAGES.items():
        table = text.split("\n## Flags\n")[1].split("\n## ")[0]
        for names, here, remarks in re.findall(r"^\| (`.*?`) \| (.*?) \| ?(.*?) ?\|$", table, re.MULTILINE):
            found += [Row(page, name, here, remarks) for name in re.findall(r"`(--.*?)`", names)]
    return found


ROWS = _rows()
TAKEN = [row for row in ROWS if row.here != "refused"]
REFUSED = [row for row in ROWS if row.here == "refused"]


def sample(flag: Flag) -> str:
    """A value other than the default, as text."""
    if flag.name in SAMPLES:
        return SAMPLES[flag.name]
    if flag.choices:
        return str(next(choice for choice in flag.choices if choice != flag.default))
    return {int: "2", float: "0.5", str: "text"}[flag.kind]


@pytest.mark.parametrize("row", TAKEN, ids=lambda row: f"{row.page}{row.spelling}")
def test_a_flag_that_is_said_to_be_taken_is(row):
    ours = row.spelling if row.here == "same" else row.here.strip("`")
    spellings = config_parser("hex-llm", "", server=True)._spellings()
    flag = FLAGS[spellings[ours.removeprefix("--").replace("-", "_")].removeprefix("--")]
    companions = COMPANIONS.get(flag.name, [])
    if flag.kind is bool:
        words, value = [row.spelling if not flag.default else f"--no-{row.spelling[2:]}"], not flag.default
    else:
        words, value = [row.spelling, sample(flag)], flag.read(sample(flag))
    assert value != flag.default
    assert getattr(Config.from_args([*words, *companions]), flag.name) == value


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row.page}{row.spelling}")
def test_a_flag_that_is_said_to_be_refused_is_with_the_words_given(row):
    with pytest.raises(ConfigError) as caught:
        Config.from_args([row.spelling])
    assert row.remarks in str(caught.value)


def test_every_flag_that_hex_llm_is_known_to_have_had_is_on_its_page():
    listed = {row.spelling.partition("=")[0] for row in ROWS if row.page == "hex-llm"}
    assert listed >= {f"--{name}" for name in (*DOCUMENTED, *RETIRED, "model", "max_prefill_seqs", "max_running_seqs")}


def test_every_flag_of_vllm_that_is_refused_by_name_is_on_its_page():
    listed = {row.spelling for row in REFUSED if row.page == "vllm"}
    assert listed >= {f"--{name.replace('_', '-')}" for name in VLLM}


def test_every_alias_of_a_flag_is_on_a_page():
    aliases = {f"--{alias}" for flag in FLAGS.values() for alias in flag.aliases} - {"--ssl-certificate"}
    assert {row.spelling for row in ROWS} >= aliases


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_is_named_exists_or_is_said_not_to(page):
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    absent = re.findall(r"All other flags.*?\n\n", text, re.DOTALL)
    missing = {name for part in absent for name in re.findall(r"--[\w-]+", part)}
    assert missing or page != "vllm"
    known = config_parser("hex-llm", "", server=True)._spellings().keys() | RETIRED.keys() | VLLM.keys()
    known |= FlagParser("bench", "", flags_of(Options))._spellings().keys() | {"goodput", "header"}
    for name in set(re.findall(r"--[a-z][\w-]*", text)) - OTHERS:
        assert (name[2:].replace("-", "_") in known) != (name in missing), name
    for name in missing:
        with pytest.raises(ConfigError, match="There is no flag"):
            Config.from_args([name])


def test_the_command_of_googles_guide_is_taken_as_it_is():
    (theirs,) = re.findall(r"^vllm serve +(.*)$", PAGES["vllm"], re.MULTILINE)
    (ours,) = re.findall(r"^hex-llm serve (.*)$", PAGES["vllm"], re.MULTILINE)
    assert theirs == ours
    config = Config.from_args(ours.split())
    assert (config.model, config.max_decode_seqs, config.gpu_memory_utilization) == (ours.split()[0], 256, 0.98)


def test_the_benchmarks_command_is_taken_as_it_is():
    (line,) = re.findall(r"^hex-llm bench serve (.*)$", PAGES["vllm"], re.MULTILINE)
    assert parse_settings(line.split()).concurrencies == (64,)


def test_the_command_of_hex_llms_notebooks_is_taken_as_it_is():
    (block,) = re.findall(r"```bash\n(.*?)```", PAGES["hex-llm"], re.DOTALL)
    config = Config.from_args(block.replace("\\\n", " ").split()[3:])
    assert (config.tensor_parallel_size, config.max_decode_seqs, config.enable_prefix_cache_hbm) == (4, 256, True)


def test_metrics_that_are_said_to_be_here_are():
    section = PAGES["vllm"].split("\n## Metrics\n")[1].split("\n## ")[0]
    (same,) = re.findall(r"These have the same names.*?: (`.*)$", section, re.MULTILINE)
    named = re.findall(r"`(\w+)`", same)
    for here in re.findall(r"^\| `.*? \| (`.*) \|$", section, re.MULTILINE):
        named += re.findall(r"`(\w+)`", here)
    assert len(named) > 25
    assert {f"hexllm:{name}" for name in named} <= rows().keys()
