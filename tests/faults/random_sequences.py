"""Random tokens as a model may write them, streamed and cut at stop strings, beside the full decode."""

import random

from hex_llm.text.detokenizer import Detokenizer
from hex_llm.text.tokenizer import REPLACEMENT, Joining, Tokenizer
from tests.text.built_tokenizers import TEXT


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
