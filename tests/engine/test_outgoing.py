"""Which blocks of a request are copied out for another engine, and when."""

from collections.abc import Sequence

from hex_llm.engine.handover import Part
from hex_llm.engine.outgoing import Outgoing
from hex_llm.engine.request import Request
from hex_llm.engine.step import Slice
from tests.engine.fakes import make_limits, make_request

SIZE = 4


class Copier:
    """A runner whose copies are the numbers of the blocks, and a porter that keeps what it is given."""

    part_blocks = 16

    def __init__(self) -> None:
        self.sent: list[Part] = []
        self.refused: list[str] = []
        self.finished: list[str] = []

    def copy_out(self, blocks: Sequence[int]) -> list[int]:
        return list(blocks)

    def has_room(self, request_id: str) -> bool:
        return True

    def send(self, part: Part) -> None:
        self.sent.append(part)

    def finish(self, request_id: str, token: int, num_blocks: int) -> None:
        self.finished.append(request_id)

    def refuse(self, request_id: str, reason: str) -> None:
        self.refused.append(request_id)

    @property
    def blocks(self) -> list[int]:
        return [block for part in self.sent for block in part.pages]


def outgoing() -> tuple[Outgoing, Copier]:
    copier = Copier()
    return Outgoing(copier, make_limits(block_size=SIZE), copier), copier  # type: ignore[arg-type]


def started(request: Request, blocks: Sequence[int], start: int, length: int) -> list[Slice]:
    """A step that computes some of a request, which has got these blocks."""
    request.slot, request.blocks = 0, list(blocks)
    samples = start + length == len(request.prompt)
    return [Slice(request, start, length, samples, True, 0)]


def test_what_was_computed_before_it_gave_way_says_nothing_of_blocks_that_it_has_now():
    going, copier = outgoing()
    request = make_request(range(40))
    request.hands_over = True
    going.add(request)
    going.note(started(request, range(1, 11), 32, 4))  # it found eight blocks, and one is copied before it is asked for
    request.slot, request.blocks = -1, []
    going.note(started(request, range(11, 21), 0, 16))  # and finds none of them later
    going.want(request.id, 0)
    assert copier.blocks == [11, 12, 13, 14]
    going.note(started(request, range(11, 21), 16, 24))
    assert [part.first for part in copier.sent] == [0, 4, 8, 9]
    assert copier.blocks == [*range(11, 19), 9, 20]
