"""The detokenizer says what decoding everything at the end would say; tests/faults/test_streaming_text.py tries it on
thousands of random sequences.
"""

import time

import pytest
from built_tokenizers import TEXT, byte_level, llama2, python, unigram

from hex_llm.errors import RequestError
from hex_llm.text.detokenizer import Detokenizer
from hex_llm.text.tokenizer import REPLACEMENT, Tokenizer


def test_every_token_shows_its_text_at_once_but_for_unfinished_characters():
    tokenizer = byte_level()
    ids = tokenizer.encode(TEXT)
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for count, id in enumerate(ids, start=1):
        shown += detokenizer.push([id])
        assert shown == tokenizer.decode(ids[:count]).rstrip(REPLACEMENT)
    assert shown == TEXT


def test_only_the_longest_beginning_of_a_stop_string_is_held():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["abab~", "b#"])

    def push(text: str) -> str:
        return detokenizer.push(tokenizer.encode(text))

    assert [push(text) for text in ("xa", "b", "aba", "b", "c", "b", "b")] == ["x", "", "ab", "", "ababc", "", "b"]
    assert detokenizer.finish() == "b"
    assert detokenizer.finish() == ""


def test_the_stop_that_completes_first_wins_over_the_one_that_starts_first():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["hello world", "lo"])
    assert detokenizer.push(tokenizer.encode("hello world")) == "hel"
    assert detokenizer.stop_reason == "lo"


def test_an_included_stop_string_is_shown_without_waiting():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["###"], include_stop_str_in_output=True)
    assert [detokenizer.push(tokenizer.encode(text)) for text in ("a#", "#", "#b", "c")] == ["a#", "#", "#", ""]


def test_the_count_of_tokens_ends_with_the_one_that_completed_the_stop():
    tokenizer = byte_level()
    ids = [*tokenizer.encode("x"), tokenizer.encode("<s>")[0], *tokenizer.encode("y"), *tokenizer.encode("zzzz")]
    detokenizer = Detokenizer(tokenizer, stop=["xy"])
    assert detokenizer.push(ids) == ""
    assert detokenizer.num_tokens == 3  # x, the special token that is not shown, y


def test_a_newline_token_is_counted_as_its_own_though_shown_with_the_next():
    tokenizer = llama2()
    newline = next(id for id in range(tokenizer.vocab_size) if tokenizer.byte_token(id) == 0x0A)
    word = tokenizer.encode("a", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, stop=["\n"])
    assert detokenizer.push([*word, newline]) == "a"
    assert detokenizer.stop_reason is None
    assert detokenizer.push(word) == ""
    assert (detokenizer.stop_reason, detokenizer.num_tokens) == ("\n", len(word) + 1)


def test_stop_strings_within_the_first_min_tokens_are_text():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=["~"], min_tokens=2)
    assert detokenizer.push(tokenizer.encode("~~~~")) == "~~"
    assert detokenizer.num_tokens == 3
    overlapping = Detokenizer(tokenizer, stop=["~~"], min_tokens=2)
    assert overlapping.push(tokenizer.encode("~") * 4) == "~"
    assert overlapping.num_tokens == 3


def test_a_bad_byte_spoils_its_whole_run_as_in_the_full_decode():
    tokenizer = unigram()
    ids = [
        id for byte in "é".encode() + b"\xff" for id in range(tokenizer.vocab_size) if tokenizer.byte_token(id) == byte
    ]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([id]) for id in ids] == ["", "", ""]
    assert detokenizer.finish() == tokenizer.decode(ids) == REPLACEMENT * 3


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="empty"):
        Detokenizer(byte_level(), stop=["a", ""])


def byte_run(tokenizer: Tokenizer, values: bytes, length: int) -> list[int]:
    ids = {spelled: id for id in range(tokenizer.vocab_size) if len(spelled := tokenizer.token_bytes(id)) == 1}
    return [ids[values[place % len(values)].to_bytes()] for place in range(length)]


def long_sequences() -> dict[str, tuple[Tokenizer, list[int], list[str]]]:
    plain, fallback, slow = byte_level(), llama2(), python()
    slow_lead = [id for id in range(slow.vocab_size) if slow.token_name(id) == "<0xE4>"]
    return {
        "text": (plain, (plain.encode(TEXT) * 60)[:8192], []),
        "text with stops": (plain, (plain.encode(TEXT) * 60)[:8192], ["never~", "the end!", "\n\n\n", "a time~"]),
        "long stop that nearly matches": (plain, plain.encode("a") * 8192, ["a" * 500 + "b", "aab"]),
        "lead bytes": (plain, byte_run(plain, b"\xe4", 8192), [REPLACEMENT * 50 + "~"]),
        "continuation bytes": (plain, byte_run(plain, b"\x80", 8192), []),
        "fallback text": (fallback, (fallback.encode(TEXT) * 60)[:8192], ["never~"]),
        "fallback lead bytes": (fallback, byte_run(fallback, b"\xf0\x9f", 8192), []),
        "fallback first spaces": (fallback, fallback.encode("▁", add_special_tokens=False) * 8192, []),
        "python lead bytes": (slow, slow_lead * 4096, []),
    }


@pytest.mark.parametrize("name", long_sequences())
def test_the_cost_of_a_token_is_flat(name: str):
    """Eight times the tokens cost eight times as much, not sixty-four, with what was put off to the end."""
    tokenizer, ids, stops = long_sequences()[name]

    def cost(count: int) -> float:
        detokenizer = Detokenizer(tokenizer, stop=stops)
        start = time.thread_time()
        for id in ids[:count]:
            detokenizer.push([id])
        detokenizer.finish()
        taken = time.thread_time() - start
        assert detokenizer.stop_reason is None
        return taken

    few, many = (min(cost(count) for _ in range(5)) for count in (len(ids) // 8, len(ids)))
    assert many < 24 * few, (few, many)
