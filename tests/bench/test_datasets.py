"""Prompts: of exact lengths, from the files that people have."""

import json

import numpy as np
import pytest

from hex_llm.bench.datasets import (
    PLAIN_IDS,
    RandomLengths,
    SonnetLengths,
    custom_prompts,
    random_prompts,
    sharegpt_prompts,
    sonnet_prompts,
)
from hex_llm.bench.prompt import Prompt
from hex_llm.bench.random_text import RandomText
from hex_llm.errors import ConfigError
from hex_llm.source import EMBEDDED_MODEL
from hex_llm.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(EMBEDDED_MODEL)


def seeded(seed=0):
    return np.random.default_rng(seed)


def lengths(*, input=100, output=10, prefix=0, range_ratio=0.0):
    return RandomLengths(input=input, output=output, prefix=prefix, range_ratio=range_ratio)


@pytest.mark.parametrize("size", [2, 3, 10, 257, 1000])
def test_random_texts_have_exactly_the_tokens_asked_for(size, tokenizer):
    prompts = random_prompts(20, lengths(input=size), tokenizer, seeded())
    assert [len(tokenizer.encode(prompt.content)) for prompt in prompts] == [size] * 20
    assert {(prompt.input_tokens, prompt.output_tokens) for prompt in prompts} == {(size, 10)}
    assert size < 10 or len({prompt.content for prompt in prompts}) == 20


def test_a_random_text_needs_room_beside_the_special_tokens(tokenizer):
    with pytest.raises(ConfigError, match="No text of 1 tokens"):
        random_prompts(1, lengths(input=1), tokenizer, seeded())


def test_a_prefix_is_shared_and_comes_on_top(tokenizer):
    prompts = random_prompts(8, lengths(input=30, prefix=50), tokenizer, seeded())
    encoded = [tokenizer.encode(prompt.content) for prompt in prompts]
    assert [len(ids) for ids in encoded] == [80] * 8
    assert len({tuple(ids[:50]) for ids in encoded}) == 1
    assert len({tuple(ids[:60]) for ids in encoded}) == 8


def test_a_range_ratio_spreads_lengths_evenly_on_both_sides():
    prompts = random_prompts(4000, lengths(input=100, output=10, range_ratio=0.5), None, seeded())
    inputs = [prompt.input_tokens or 0 for prompt in prompts]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert np.mean(inputs) == pytest.approx(100, rel=0.02)
    assert {prompt.output_tokens for prompt in prompts} == set(range(5, 16))


def test_without_a_tokenizer_random_prompts_are_token_ids():
    prompts = random_prompts(5, lengths(input=64, prefix=8), None, seeded())
    assert all(len(prompt.content) == prompt.input_tokens == 72 for prompt in prompts)
    assert len({prompt.content[:8] for prompt in prompts}) == 1
    assert len({prompt.content for prompt in prompts}) == 5
    assert {id for prompt in prompts for id in prompt.content} <= set(range(*PLAIN_IDS))


def test_the_seed_decides_the_prompts(tokenizer):
    first, again, other = (random_prompts(3, lengths(), tokenizer, seeded(seed)) for seed in (1, 1, 2))
    assert first == again != other


class CharacterTokenizer:
    """One token per character: no token is a word after a space."""

    vocab_size = 128
    special_ids = frozenset({0})

    def piece(self, id):
        return chr(id)

    def encode(self, text, add_special_tokens=True):
        return [ord(character) for character in text]


def test_a_tokenizer_without_words_makes_texts_of_what_it_has():
    text = RandomText(CharacterTokenizer(), seeded()).of_tokens(40, [])
    assert len(text) == 40


def sharegpt(path, *pairs):
    conversations = [{"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in pairs]
    path.write_text(
        json.dumps([*conversations, {"conversations": [{"value": "alone"}]}, {}, 7, {"conversations": [1, 2]}])
    )
    return path


def test_sharegpt_takes_first_turns_with_answers_of_their_length(tmp_path, tokenizer):
    question, answer = "What is the capital of France?", "The capital of France is Paris."
    path = sharegpt(
        tmp_path / "chats.json", (question, answer), ("a", answer), (question, "a"), ("word " * 3000, answer)
    )
    expected = Prompt(
        question, len(tokenizer.encode(question)), len(tokenizer.encode(answer, add_special_tokens=False))
    )
    assert sharegpt_prompts(path, 1, None, tokenizer, seeded()) == [expected]
    assert sharegpt_prompts(path, 3, None, tokenizer, seeded()) == [expected] * 3  # the others are too short or long


def test_sharegpt_answers_can_have_one_length(tmp_path, tokenizer):
    path = sharegpt(tmp_path / "chats.json", ("What is the capital of France?", "a"))
    assert [prompt.output_tokens for prompt in sharegpt_prompts(path, 1, 77, tokenizer, seeded())] == [77]


def test_sharegpt_order_is_the_seeds(tmp_path, tokenizer):
    path = sharegpt(tmp_path / "chats.json", *((f"Question number {n}?", "An answer to it.") for n in range(20)))
    first, again, other = (sharegpt_prompts(path, 20, None, tokenizer, seeded(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 20


def test_sonnet_prompts_are_lines_up_to_the_length_with_a_shared_start(tmp_path, tokenizer):
    path = tmp_path / "poem.txt"
    lines = [f"The {word} is on the way to the sea and back." for word in ("one", "two", "six", "ten", "red", "hat")]
    path.write_text("\n\n".join(lines))
    prompts = sonnet_prompts(path, 6, SonnetLengths(input=200, output=9, prefix=90), tokenizer, seeded())
    sizes = [len(tokenizer.encode(prompt.content)) for prompt in prompts]
    assert sizes == [prompt.input_tokens for prompt in prompts]
    longest = max(len(tokenizer.encode(line + "\n", add_special_tokens=False)) for line in lines)
    assert all(200 - longest - 5 <= size <= 200 for size in sizes)
    assert len({tuple(tokenizer.encode(prompt.content)[: 90 - longest]) for prompt in prompts}) == 1
    assert len({prompt.content for prompt in prompts}) == 6


def test_a_sonnet_needs_room_for_a_line(tmp_path, tokenizer):
    path = tmp_path / "poem.txt"
    path.write_text("a line of a poem\n")
    with pytest.raises(ConfigError, match="--sonnet_input_len=5 is not enough"):
        sonnet_prompts(path, 1, SonnetLengths(input=5, output=9, prefix=0), tokenizer, seeded())


def test_custom_prompts_are_the_lines_of_a_file_over_and_over(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "two\\u2028three"}\n')
    prompts = custom_prompts(path, 3, 50, None)
    assert prompts == [Prompt("one", None, 3), Prompt("two\u2028three", None, 50), Prompt("one", None, 3)]


def test_custom_prompts_are_counted_by_the_tokenizer(tmp_path, tokenizer):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello world"}')
    assert custom_prompts(path, 1, 5, tokenizer)[0].input_tokens == len(tokenizer.encode("hello world"))


def test_lines_that_are_not_asked_for_are_not_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\nbroken')
    assert len(custom_prompts(path, 1, 5, None)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no prompt that can be used."),
        ("{]", "line 1 is not JSON."),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2 has no text as its prompt."),
        ('{"prompt": ""}', "line 1 has no text as its prompt."),
        ("[1]", "line 1 has no text as its prompt."),
        ('{"prompt": "a", "output_tokens": 0}', "line 1 has output_tokens 0, not an integer of at least 1."),
        ('{"prompt": "a", "output_tokens": "5"}', "line 1 has output_tokens '5', not an integer of at least 1."),
    ],
)
def test_a_bad_custom_file_is_refused(content, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        custom_prompts(path, 5, 5, None)
    assert str(caught.value).startswith(f"--dataset_path={path}")
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize(("content", "message"), [("{]", "is not JSON"), ("{}", "is not a list"), ("[]", "no prompt")])
def test_a_bad_sharegpt_file_is_refused(content, message, tmp_path, tokenizer):
    path = tmp_path / "chats.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        sharegpt_prompts(path, 1, None, tokenizer, seeded())


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        custom_prompts(tmp_path / "none", 1, 1, None)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        custom_prompts(tmp_path / "bytes", 1, 1, None)
