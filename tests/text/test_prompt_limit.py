"""A text that cannot fit is refused before all of it is tokenized."""

import pytest
from built_tokenizers import byte_level

from hex_llm.errors import ContextTooLong
from hex_llm.text.prompt_limit import PromptLimit


class Counting:
    """A tokenizer that remembers the most it has been given."""

    def __init__(self):
        self.most = 0
        self.max_token_chars = 1000

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.most = max(self.most, len(text))
        return [0] * (len(text) // 4)


def test_more_characters_than_the_longest_tokens_hold_are_refused():
    tokenizer = byte_level()
    limit = PromptLimit.of(tokenizer, 10)
    assert limit.max_chars == 10 * tokenizer.max_token_chars
    limit.check("a" * limit.max_chars)
    with pytest.raises(ContextTooLong, match=f"{limit.max_chars + 1} characters, more than the {limit.max_chars} "):
        limit.encode(tokenizer, "a" * (limit.max_chars + 1))


def test_a_long_text_is_tried_by_its_beginning():
    tokenizer = Counting()
    limit = PromptLimit.of(tokenizer, 100)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ContextTooLong, match=r"first 1200 of 90000 characters are 300 tokens; .* is 100 tokens"
    ) as raised:
        limit.encode(tokenizer, "a" * 90_000, param="prompt")  # pyright: ignore[reportArgumentType]
    assert raised.value.param == "prompt"
    assert tokenizer.most == 1200


def test_a_text_of_a_few_too_many_tokens_is_encoded_for_others_to_count():
    tokenizer = byte_level()
    limit = PromptLimit.of(tokenizer, 10)
    assert limit.encode(tokenizer, "~" * 25) == tokenizer.encode("~" * 25)
