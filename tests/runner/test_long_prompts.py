"""Which tokens of a step are rotated as those of a long sequence."""

import jax.numpy as jnp
import numpy as np

from hex_llm.engine.admission import new_request
from hex_llm.engine.request import SamplingParams
from hex_llm.engine.step import Slice
from hex_llm.runner.buckets import Buckets
from hex_llm.runner.forward import _batch
from hex_llm.runner.layout import Layout, Shapes
from hex_llm.runner.pack import Packer
from hex_llm.runner.state import empty_slots
from tests.engine.fakes import make_limits

BUCKETS = Buckets(decode_padding=4, max_decodes=4, mixed_padding=16, max_mixed_tokens=32, max_mixed_seqs=4)


def packer(*, has_long: bool = True) -> Packer:
    shapes = Shapes(
        num_slots=4,
        page_size=4,
        table_width=8,
        num_pages=40,
        max_fresh=4,
        mixed_tokens=32,
        max_model_len=32,
        vocab_size=40,
        has_long=has_long,
    )
    return Packer(shapes, BUCKETS)


def request(slot: int, num_prompt: int, *, is_long: bool):
    made = new_request(f"r{slot}", [1] * num_prompt, SamplingParams(), make_limits())
    made.slot, made.blocks, made.is_long = slot, list(range(1, 9)), is_long
    return made


def long_tokens(packer: Packer, *step: Slice) -> list[list[int]] | None:
    """The positions of the tokens above the switch, for each slice."""
    packed = packer.pack(step)
    layout = Layout(packed.bucket, packer._shapes)
    batch, _, _ = _batch(layout.cut(jnp.asarray(packed.blob)), empty_slots(packer._shapes), layout)
    if batch.long is None:
        return None
    long, found, place = np.asarray(batch.long), [], 0
    for piece in step:
        found.append([piece.start + i for i in range(piece.length) if long[place + i]])
        place += piece.length
    return found


def piece(request, start: int, length: int, *, fresh: bool = False) -> Slice:
    return Slice(request, start, length, samples=True, fresh=fresh, num_old_blocks=0 if fresh else 8)


def test_all_tokens_of_a_long_sequence_are_long_and_none_of_a_short_one():
    above, below = request(0, 9, is_long=True), request(1, 8, is_long=False)
    found = long_tokens(packer(), piece(above, 0, 9, fresh=True), piece(below, 0, 8, fresh=True))
    assert found == [list(range(9)), []]


def test_each_chunk_of_a_long_prompt_is_long():
    pack, above = packer(), request(2, 20, is_long=True)
    assert long_tokens(pack, piece(above, 0, 5, fresh=True)) == [list(range(5))]
    assert long_tokens(pack, piece(above, 5, 2)) == [[5, 6]]
    assert long_tokens(pack, piece(above, 7, 1)) == [[7]]


def test_a_slot_forgets_that_the_request_before_was_long():
    pack = packer()
    pack.pack([piece(request(1, 20, is_long=True), 0, 20, fresh=True)])
    pack.pack([piece(request(1, 4, is_long=False), 0, 4, fresh=True)])
    assert long_tokens(pack, piece(request(1, 4, is_long=False), 3, 1)) == [[]]


def test_a_model_without_a_switch_is_asked_nothing():
    assert long_tokens(packer(has_long=False), piece(request(0, 20, is_long=False), 0, 20, fresh=True)) is None
