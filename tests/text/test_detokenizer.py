"""The detokenizer says what decoding everything at the end would say."""

import random
import time

import pytest
from built_tokenizers import EXACT, TEXT, WINDOWED, byte_level, llama2, python, unigram

from hex_llm.errors import RequestError
from hex_llm.text.detokenizer import Detokenizer
from hex_llm.text.tokenizer import REPLACEMENT, Joining, Tokenizer

NUM_SEQUENCES = 10_000
SHARDS = 10


def random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Text, noise and runs of bytes, with special tokens and ids that have no token strewn in."""
    byte_ids = [id for id in range(tokenizer.vocab_size) if tokenizer.byte_token(id) is not None]
    ids: list[int] = []
    for _ in range(rng.randint(0, 10)):
        start = rng.randrange(len(TEXT))
        part = tokenizer.encode(TEXT[start : start + rng.randint(0, 40)], add_special_tokens=rng.random() < 0.3)
        kind = rng.random()
        if kind < 0.3:
            part = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 10))]
        elif kind < 0.5 and byte_ids:
            whole = rng.choice("é你🚀\n a").encode() + (rng.randbytes(1) if rng.random() < 0.3 else b"")
            value_ids = {tokenizer.byte_token(id): id for id in byte_ids}
            part = [value_ids[byte] for byte in whole]
        elif kind < 0.6:
            part = [rng.choice([*tokenizer.special_ids, tokenizer.vocab_size + 3])]
        ids += part
    return ids


def random_stops(text: str, rng: random.Random) -> list[str]:
    """One to four pieces of the text, some with an ending that is not there, so that they are held in vain."""
    stops = []
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text))
        stop = text[start : start + rng.randint(1, 12)]
        stops.append(stop + "~" if rng.random() < 0.4 else stop)
    return stops


def cut_at_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the first place where it ends with a stop string, said as plainly as can be."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def random_chunks(ids: list[int], rng: random.Random) -> list[list[int]]:
    chunks, start = [], 0
    while start < len(ids):
        size = rng.choice([0, 1, 1, 1, 2, 5, 30])
        chunks.append(ids[start : start + size])
        start += size
    return chunks


def check_random_sequence(tokenizer: Tokenizer, rng: random.Random) -> bool:
    """Returns whether a stop string ended the text."""
    ids = random_ids(tokenizer, rng)
    skip, include = rng.random() < 0.5, rng.random() < 0.3
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    stops = random_stops(whole, rng) if whole and rng.random() < 0.8 else []
    expected, stop = cut_at_stop(whole, stops, include)

    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, stop=stops, include_stop_str_in_output=include)
    deltas = [detokenizer.push(chunk) for chunk in random_chunks(ids, rng)]
    deltas.append(detokenizer.finish())

    assert "".join(deltas) == expected, (ids, stops, skip, include)
    assert detokenizer.stop_reason == stop
    assert all(delta.count(REPLACEMENT) <= whole.count(REPLACEMENT) for delta in deltas)
    if stop is None:
        assert detokenizer.num_tokens == len(ids)
        return False
    count = detokenizer.num_tokens
    assert detokenizer.push(ids) == detokenizer.finish() == ""
    assert detokenizer.num_tokens == count
    if REPLACEMENT not in stop and tokenizer.joining is not Joining.WINDOW:
        reached = expected if include else expected + stop
        assert tokenizer.decode(ids[:count], skip_special_tokens=skip).startswith(reached), (ids, stops, count)
        assert not tokenizer.decode(ids[: count - 1], skip_special_tokens=skip).startswith(reached)
    return True


@pytest.mark.parametrize("shard", range(SHARDS))
def test_deltas_are_the_full_decode_cut_at_the_first_completed_stop(shard: int):
    stopped = 0
    for seed in range(shard, NUM_SEQUENCES, SHARDS):
        stopped += check_random_sequence(EXACT[seed // SHARDS % len(EXACT)](), random.Random(seed))
    assert stopped > NUM_SEQUENCES / SHARDS / 5  # or else the test would have tested little


@pytest.mark.parametrize("build", WINDOWED)
def test_decoders_nothing_is_known_about_stream_the_full_decode_too(build):
    assert build().joining is Joining.WINDOW
    for seed in range(300):
        check_random_sequence(build(), random.Random(seed))


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
