"""Which tokens of a step are above the rope's switch."""

import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.engine.admission import new_request
from hex_llm.engine.request import SamplingParams
from hex_llm.engine.step import Slice
from hex_llm.runner.buckets import Buckets
from hex_llm.runner.forward import _batch
from hex_llm.runner.layout import Layout, Shapes
from hex_llm.runner.pack import Packer
from hex_llm.runner.state import empty_slots
from tests.engine.fakes import make_limits

SWITCH = 8
BUCKETS = Buckets(decode_padding=4, max_decodes=4, mixed_padding=16, max_mixed_tokens=32, max_mixed_seqs=4)


def packer(rope_switch: int | None = SWITCH) -> Packer:
    shapes = Shapes(
        num_slots=4,
        page_size=4,
        table_width=8,
        num_pages=40,
        max_fresh=4,
        mixed_tokens=32,
        max_model_len=32,
        vocab_size=40,
        rope_switch=rope_switch,
    )
    return Packer(shapes, BUCKETS)


def request(slot: int, num_prompt: int, num_output: int = 0):
    made = new_request(f"r{slot}", [1] * num_prompt, SamplingParams(), make_limits())
    made.slot, made.blocks, made.output = slot, list(range(1, 9)), [2] * num_output
    return made


def long_tokens(packer: Packer, *step: Slice) -> list[list[int]] | None:
    """The positions of the tokens above the switch, for each slice."""
    packed = packer.pack(step)
    layout = Layout(packed.bucket, packer._shapes)
    batch, _ = _batch(layout.cut(jnp.asarray(packed.blob)), empty_slots(packer._shapes), layout)
    if batch.long is None:
        return None
    long, found, place = np.asarray(batch.long), [], 0
    for piece in step:
        found.append([piece.start + i for i in range(piece.length) if long[place + i]])
        place += piece.length
    return found


def piece(request, start: int, length: int, *, fresh: bool = False) -> Slice:
    return Slice(request, start, length, samples=True, fresh=fresh, num_old_blocks=0 if fresh else 8)


def test_all_tokens_of_a_prompt_above_the_switch_are_long_and_none_of_one_below():
    above, at = request(0, SWITCH + 1), request(1, SWITCH)
    found = long_tokens(packer(), piece(above, 0, 9, fresh=True), piece(at, 0, 8, fresh=True))
    assert found == [list(range(9)), []]


def test_each_chunk_of_a_long_prompt_is_long():
    pack, above = packer(), request(2, 20)
    assert long_tokens(pack, piece(above, 0, 5, fresh=True)) == [list(range(5))]
    assert long_tokens(pack, piece(above, 5, 2)) == [[5, 6]]
    assert long_tokens(pack, piece(above, 7, 1)) == [[7]]


@pytest.mark.parametrize(("num_output", "long"), [(1, False), (3, False), (4, True), (9, True)])
def test_the_tokens_of_an_output_are_long_once_their_position_is_above_the_switch(num_output, long):
    pack, grown = packer(), request(1, 5, num_output)
    pack.pack([piece(grown, 0, 5, fresh=True)])
    last = 5 + num_output - 1
    assert long_tokens(pack, piece(grown, last, 1)) == [[last] if long else []]


def test_computed_again_a_short_prompt_stays_short_beside_an_output_that_is_long():
    again, above = request(3, 5, 6), request(0, 12)
    found = long_tokens(packer(), piece(above, 0, 3, fresh=True), piece(again, 0, 11, fresh=True))
    assert found == [[0, 1, 2], [8, 9, 10]]


def test_a_slot_forgets_that_the_request_before_was_long():
    pack = packer()
    pack.pack([piece(request(1, 20), 0, 20, fresh=True)])
    pack.pack([piece(request(1, 4), 0, 4, fresh=True)])
    assert long_tokens(pack, piece(request(1, 4), 3, 1)) == [[]]


def test_a_model_without_a_switch_is_asked_nothing():
    assert long_tokens(packer(rope_switch=None), piece(request(0, 20), 0, 20, fresh=True)) is None
