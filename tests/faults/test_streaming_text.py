"""F31: the pieces of a stream are the full decode, cut at the first stop string that is completed."""

import random
from collections.abc import Callable

import pytest

from hex_llm.text.tokenizer import Joining, Tokenizer
from tests.faults.random_sequences import check_random_sequence
from tests.faults.suite import record, sized
from tests.text.built_tokenizers import EXACT, WINDOWED

NUM_SEQUENCES = sized(1000, 10_000)  # for each tokenizer


@pytest.mark.parametrize("build", [*EXACT, *WINDOWED], ids=lambda build: build.__name__)
def test_deltas_are_the_full_decode_cut_at_the_first_completed_stop(build: Callable[[], Tokenizer]):
    tokenizer = build()
    assert (tokenizer.joining is Joining.WINDOW) == (build in WINDOWED)
    stopped = sum(check_random_sequence(tokenizer, random.Random(seed)) for seed in range(NUM_SEQUENCES))
    assert stopped > NUM_SEQUENCES / 5  # or else the test would have tested little
    record("F31", f"`{build.__name__}` {NUM_SEQUENCES:,} of {NUM_SEQUENCES:,}, {stopped:,} ended by a stop string")
