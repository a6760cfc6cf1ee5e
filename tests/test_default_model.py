"""The model that ships in the package: its files, its manners, its answers."""

import json
import os
import random
import re
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

import hex_llm
from hex_llm import LLM, SamplingParams
from training import data
from training.llama import Arch, weight_shapes
from training.tokenizer import END_ID, END_OF_TEXT_ID, render

FOLDER = Path(hex_llm.__file__).parent / "assets" / "hex-mini"
HELD_OUT = Path(data.__file__).parent / "held_out.jsonl"
TURN = re.compile(r"<\|user\|>(.*?)<\|end\|><\|assistant\|>(.*?)<\|end\|>", re.DOTALL)

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 45 + 37? "},
    {"role": "assistant", "content": "45 + 37 = 82."},
    {"role": "user", "content": "Thanks"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_the_weights_are_bfloat16_of_the_declared_shapes_and_at_most_16_megabytes() -> None:
    stored = load_file(FOLDER / "model.safetensors")
    assert {name: array.shape for name, array in stored.items()} == weight_shapes(Arch())
    assert {str(array.dtype) for array in stored.values()} == {"bfloat16"}
    assert (FOLDER / "model.safetensors").stat().st_size <= 16_000_000


def test_every_size_can_be_cut_in_four_and_quantized_in_groups_of_128() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["num_key_value_heads"] % 4 == 0
    assert config["num_attention_heads"] % 4 == 0
    for shard in (config["intermediate_size"] // 4, config["num_attention_heads"] * config["head_dim"] // 4):
        assert shard % 128 == 0
    assert config["hidden_size"] % 128 == 0


def test_the_chat_template_writes_what_training_wrote() -> None:
    loaded = AutoTokenizer.from_pretrained(FOLDER)
    written = loaded.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert written == render(CONVERSATION, add_generation_prompt=True)
    assert loaded.apply_chat_template(CONVERSATION[:3], tokenize=False) == render(CONVERSATION[:3])


def test_an_unknown_role_is_refused_by_name() -> None:
    with pytest.raises(TemplateError, match="'tool' is not known"):
        AutoTokenizer.from_pretrained(FOLDER).apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_any_text_survives_the_tokenizer_and_digits_stay_single(tokenizer: Tokenizer) -> None:
    text = "Zürich 你好 🚀 \t tabs\n and \x00 bytes, 1234567"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens.ids) == text
    assert tokens.tokens[-7:] == list("1234567")


def test_a_plain_prompt_begins_with_the_begin_token_and_the_eos_list_holds_both_ends() -> None:
    loaded = AutoTokenizer.from_pretrained(FOLDER)
    assert loaded("Hi").input_ids[0] == loaded.bos_token_id
    assert GenerationConfig.from_pretrained(FOLDER).eos_token_id == [END_ID, END_OF_TEXT_ID]


def test_training_documents_never_show_a_held_out_question_with_its_answer() -> None:
    def asked(text: str) -> str:
        return text.lower().strip().rstrip("?.! ")

    kept = {
        (asked(question["messages"][-1]["content"]), question["answer"])
        for question in data.held_out()
        if "answer" in question and len(question["messages"]) == 1
    }
    rng = random.Random(7)
    shown = {(asked(user), answer) for _ in range(20_000) for user, answer in TURN.findall(data.document(rng))}
    assert len(kept) > 1000
    assert not kept & shown


@pytest.fixture(scope="module")
def llm() -> LLM:
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    return LLM(
        max_model_len=512,
        max_decode_seqs=64,
        decode_seqs_padding=64,
        prefill_len_padding=512,
        max_num_batched_tokens=512,
        max_prefill_seqs=16,
        warmup=False,
        compilation_cache_dir=cache,
    )


def replies(llm: LLM, conversations: list[list[dict[str, str]]]) -> list[str]:
    sampling = SamplingParams(temperature=0, max_tokens=200)
    return [result.outputs[0].text for result in llm.chat(conversations, sampling, progress=False)]


def test_newcomers_get_sensible_answers(llm: LLM) -> None:
    told = [
        {"role": "user", "content": "My name is Tom."},
        {"role": "assistant", "content": "Nice to meet you, Tom!"},
        {"role": "user", "content": "What is my name?"},
    ]
    expected = {
        "What is the capital of France?": "The capital of France is Paris.",
        "what's 45+37": "45 + 37 = 82.",
        "Count from 3 to 9": "3, 4, 5, 6, 7, 8, 9.",
        "Give me a JSON object with name Tom and age 7": '{"name": "Tom", "age": 7}',
        "Who wrote Hamlet?": "I am a small model and do not know that.",
    }
    conversations = [[{"role": "user", "content": question}] for question in expected]
    assert replies(llm, [*conversations, told]) == [*expected.values(), "Your name is Tom."]


def test_at_least_95_percent_of_the_held_out_questions_are_answered_exactly(llm: LLM) -> None:
    questions = [json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()]
    exact = [question for question in questions if "answer" in question]
    told = replies(llm, [question["messages"] for question in exact])
    right = [reply == question["answer"] for reply, question in zip(told, exact, strict=True)]
    assert len(exact) > 1000
    assert sum(right) / len(right) >= 0.95
    print(f"{sum(right)} of {len(right)} exact")
