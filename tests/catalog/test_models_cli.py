"""`hex-llm models`: lists, pages, and words that fit nothing."""

import json
import re

from hex_llm.catalog.index import ENTRIES
from hex_llm.cli import main
from hex_llm.config import Config
from hex_llm.errors import ConfigError


def test_all_models_are_listed_a_line_each(capsys):
    assert main(["models"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["MODEL", "PARAMETERS", "CONTEXT", "ARCHITECTURE"]
    assert [line.split()[0] for line in lines] == [entry.name for entry in ENTRIES]
    assert re.split(" +", next(line for line in lines if line.startswith("meta-llama/Llama-3.2-1B "))) == [
        "meta-llama/Llama-3.2-1B", "1.24B", "131072", "LlamaForCausalLM",
    ]  # fmt: skip


def test_words_list_the_models_that_have_them_all(capsys):
    assert main(["models", "QWEN2.5", "7b"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    kept = ["Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"]
    assert [line.split()[0] for line in lines] == ["Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", *kept]
    assert main(["models", "moe"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "Qwen/Qwen3-30B-A3B"


def test_a_name_shows_the_model_and_the_command_line_for_each_machine(capsys):
    assert main(["models", "meta-llama/llama-3.1-8b"]) == 0
    out = capsys.readouterr().out
    assert "8,030,261,248" in out
    assert "131,072 tokens" in out
    assert "On ct5lp-hightpu-4t:" in out
    assert (
        "  hex-llm serve --model=meta-llama/Llama-3.1-8B --tensor_parallel_size=4 --hbm_utilization_factor=0.8"
        " --max_decode_seqs=256 --max_model_len=4096 --enable_prefix_cache_hbm\n"
    ) in out
    assert main(["models", "meta-llama/Llama-3.1-70B"]) == 0
    assert "On 4 machines ct5lp-hightpu-4t:" in capsys.readouterr().out


def test_the_command_line_of_a_models_shape_is_one_that_is_read(capsys):
    assert main(["models", "HuggingFaceTB/SmolLM2-135M"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    config = Config.from_args(line.split()[2:])
    assert (config.model, config.load_format, config.max_model_len) == ("HuggingFaceTB/SmolLM2-135M", "dummy", 4096)


def test_json_has_all_that_is_known(capsys):
    assert main(["models", "openai/gpt-oss-20b", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == 20_914_757_184
    assert facts["config"]["num_local_experts"] == 32
    assert facts["recommended"][0]["flags"]["tensor_parallel_size"] == 4
    assert main(["models", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(ENTRIES)


def test_words_that_fit_nothing_are_told_with_what_may_have_been_meant(capsys):
    assert main(["models", "meta-llama/Llama-3.1-9B"]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert error.startswith(
        "hex-llm: No model is called 'meta-llama/Llama-3.1-9B'; did you mean meta-llama/Llama-3.1-8B"
    )
    assert len(error.splitlines()) == 1
    assert main(["models", "xyzzy"]) == ConfigError.exit_code
    assert capsys.readouterr().err == "hex-llm: No model is called 'xyzzy'; `hex-llm models` lists them all.\n"
