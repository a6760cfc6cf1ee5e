"""A catalogued model runs by its name, on random weights, wherever a model is named."""

import json
import logging
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

import hex_llm.source
from hex_llm import LLM, SamplingParams
from hex_llm.catalog.entry import Entry
from hex_llm.catalog.llama import LLAMA
from hex_llm.cli import main
from hex_llm.errors import DownloadError
from hex_llm.text.tokenizer import Tokenizer
from tests.runner.engines import SMALL
from tests.server.servers import running_server

NAME = "example/tiny-llama"
# More tokens than the embedded tokenizer has, as all real models do.
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
TINY = Entry(NAME, 0, {**LLAMA[0].config, **SIZES}, ())

# The processes of a server find the tiny model in their catalog, too.
ADD_TINY = """
import hex_llm.catalog.index as index
from hex_llm.catalog.entry import Entry
index._BY_NAME[{name!r}] = Entry({name!r}, 0, {config!r}, ())
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Few shapes, the same for all, that only the first one compiles."""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(tmp_path_factory.mktemp("cache"))
    return SMALL | {"load_format": "dummy", "compilation_cache_dir": cache}


def spelled(settings):
    """The same for a command line."""
    return ["--no-warmup", *(f"--{name}={value}" for name, value in settings.items() if name != "warmup")]


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(hex_llm.source, "find", lambda name: TINY if name == NAME else None)


def test_generate_and_chat_take_it(tiny, settings, caplog):
    caplog.set_level(logging.INFO, "hex_llm")
    llm = LLM(NAME, **settings)
    said = [record.getMessage() for record in caplog.records if record.name == "hex_llm.build"]
    assert (
        f"{NAME} has no files here: its numbers are the catalog's, its weights random, its tokenizer that of" in said[0]
    )
    assert "hex-mini" in said[0]
    assert llm.engine.limits.vocab_size == 4096
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (result,) = llm.generate("hello", sampling, progress=False)
    assert len(result.outputs[0].token_ids) == 6
    (result,) = llm.chat([{"role": "user", "content": "hello"}], sampling, progress=False)
    assert result.prompt_token_ids


def test_a_tokenizer_that_is_given_is_taken_with_its_end_tokens(tiny, settings, tmp_path):
    for file in hex_llm.source.EMBEDDED_MODEL.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    llm = LLM(NAME, tokenizer=str(tmp_path), **settings)
    assert 7 in llm.tokenizer.eos_ids
    assert 7 not in Tokenizer.load(hex_llm.source.EMBEDDED_MODEL).eos_ids


def test_without_dummy_weights_it_is_one_of_the_hub(tiny, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match=f"{NAME} was never downloaded"):
        LLM(NAME, **SMALL)


def test_bench_offline_takes_it(tiny, settings, tmp_path):
    argv = ["bench", "offline", NAME, *spelled(settings), f"--json={tmp_path / 'result'}"]
    assert main([*argv, "--input-len=8", "--output-len=4", "--num-prompts=2", "--batch=2"]) == 0
    assert json.loads((tmp_path / "result").read_text())["model"] == NAME


def test_a_server_serves_it_under_its_name(settings, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ADD_TINY.format(name=NAME, config=dict(TINY.config)))
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    with running_server(
        None, tmp_path / "log", f"--model={NAME}", *spelled(settings), small=False, PYTHONPATH=path
    ) as server:
        (model,) = server.get("/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == (NAME, 96)
        asked = {"instances": [{"prompt": "hello", "max_tokens": 4, "temperature": 0}]}
        answer = server.post("/generate", asked)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["predictions"]) == 1
        chat = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert server.post("/v1/chat/completions", chat).json()["usage"]["completion_tokens"] >= 1
    assert "its tokenizer that of hex-mini" in (tmp_path / "log").read_text()
