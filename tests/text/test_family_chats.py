"""Chats end with the end tokens of their family, which are no part of the text."""

from pathlib import Path

import pytest
from families import FAMILIES
from family_files import write_family

from hex_llm import LLM, SamplingParams
from hex_llm.engine.request import FinishReason
from hex_llm.text.tokenizer import Tokenizer
from tests.checkpoints import llama_config, write_llama
from tests.runner.engines import SMALL

VOCAB_SIZE = 384
ROOMY = SMALL | {"max_model_len": 512, "num_blocks": 1024}
LENGTH = 4


def write_model(name: str, folder: Path) -> Path:
    """A tiny model with the text side of a family."""
    write_llama(folder, vocab_size=VOCAB_SIZE)
    sizes = llama_config(vocab_size=VOCAB_SIZE, eos_token_id=None)
    for left_over in folder.glob("*token*"):
        left_over.unlink()
    write_family(FAMILIES[name], folder, compact=True, sizes=sizes)
    return folder


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    """A Llama, to which every family lends its text side."""
    return LLM(str(write_model("llama-3.1", tmp_path_factory.mktemp("model"))), **ROOMY)


def assert_chats_end(llm: LLM, name: str) -> None:
    family, tokenizer = FAMILIES[name], llm.tokenizer
    ids = family.compact()
    stops = {ids[token] for token, id in family.tokens.items() if id in family.stops}
    assert tokenizer.eos_ids == stops
    asked = [
        (stop, {"skip_special_tokens": skip, "include_stop_str_in_output": include, "ignore_eos": ignore})
        for stop in sorted(stops)
        for skip, include, ignore in [
            (True, False, False),
            (True, True, False),
            (False, False, False),
            (False, True, False),
            (False, False, True),
        ]
    ]
    # The end token is what the model wants to write all along, but not for so many tokens.
    samplings = [
        SamplingParams(
            temperature=0, max_tokens=2 * LENGTH, min_tokens=LENGTH - 1, logit_bias={stop: 100.0}, **switches
        )
        for stop, switches in asked
    ]
    results = llm.chat([family.messages] * len(asked), samplings, progress=False)
    for (stop, switches), result in zip(asked, results, strict=True):
        (output,) = result.outputs
        skip, shown = switches["skip_special_tokens"], switches["include_stop_str_in_output"]
        if switches["ignore_eos"]:
            assert (output.finish_reason, output.token_ids[LENGTH - 1 :]) == (
                FinishReason.LENGTH,
                [stop] * (LENGTH + 1),
            )
            assert output.text.endswith((tokenizer.token_name(stop) or "") * (LENGTH + 1))
            continue
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, None)
        assert len(output.token_ids) == LENGTH
        assert output.token_ids[-1] == stop
        visible = output.token_ids if shown else output.token_ids[:-1]
        assert output.text == tokenizer.decode(visible, skip_special_tokens=skip)
        if not skip:
            assert output.text.endswith(tokenizer.token_name(stop) or "") == shown


def assert_reads_its_prompt(llm: LLM, name: str) -> None:
    (result,) = llm.chat(FAMILIES[name].messages, SamplingParams(temperature=0, max_tokens=1), progress=False)
    assert llm.tokenizer.decode(result.prompt_token_ids, skip_special_tokens=False) == FAMILIES[name].prompt


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_ends_at_each_end_token_of_its_family(llm: LLM, name: str, tmp_path: Path, monkeypatch):
    write_family(FAMILIES[name], tmp_path, compact=True)
    monkeypatch.setattr(llm, "tokenizer", Tokenizer.load(tmp_path))
    assert_chats_end(llm, name)


def test_llama_chats_from_a_folder_of_its_own(llm: LLM):
    assert_chats_end(llm, "llama-3.1")
    assert_reads_its_prompt(llm, "llama-3.1")


def test_gemma_chats_from_a_folder_of_its_own(tmp_path: Path):
    llm = LLM(str(write_model("gemma-3", tmp_path)), **ROOMY)
    assert_chats_end(llm, "gemma-3")
    assert_reads_its_prompt(llm, "gemma-3")
