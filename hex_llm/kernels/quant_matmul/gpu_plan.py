"""How a product with a weight in few bits is cut on Hopper (`gpu`)."""

from collections.abc import Iterator
from dataclasses import dataclass

from hex_llm.kernels.chain import padded
from hex_llm.kernels.hopper import MOST_BARRIERS, SHARED_BYTES, num_sms
from hex_llm.kernels.quant_matmul import gpu_w4a8_zeros
from hex_llm.kernels.quant_matmul.gpu_layout import CHUNK, grouping_of
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, HOPPER_ROWS, Packed, bits

MAX_SPLITS = 8
FEWEST_TOKENS = 64  # of a piece of work, where tokens are cut


@dataclass(frozen=True)
class Plan:
    """How a product is cut."""

    workers: int  # warpgroups that multiply: 1 or 2
    stack: int  # tiles of 64 rows that each of them multiplies side by side, 1 or 2: two are gate and up, if there are
    tokens: int | None = None  # of a piece of work; all if not given
    depth: int = HOPPER_COLUMNS  # columns of the weight in one slot of the ring: of a tile, or of half a tile
    splits: int = 1  # pieces of `in`, each a piece of work of its own
    even: bool = False  # whether pieces that are left when all blocks have had as many are shared by all of them
    band: int = 8  # pieces of tokens that run side by side
    slots: int | None = None  # of the ring; as many as fit if not given
    blocks: int | None = None  # at a time; if not given, one on each SM, or as few as have no more to do

    @property
    def rows(self) -> int:
        """Of the weight, for one block at a time."""
        return self.workers * self.stack * HOPPER_ROWS


@dataclass(frozen=True)
class Pace:
    """What tokens of a type make of a product. Times are in microseconds."""

    memory: float  # takes so long to give a block a tile
    tile: float  # takes so long, where two warpgroups multiply,
    token: float  # and for each token so much longer
    split_bytes: float  # of results that splits leave: so many are written, and read again, in one microsecond
    alone: tuple[float, float]  # times as long where one multiplies one tile, or two
    tile_of_many: float  # the same where tokens are cut
    token_of_many: float
    most_tokens: int  # of a piece of work, where tokens are cut
    deep_tokens: int  # and up to which a slot has a whole tile
    token_bytes: int  # that a column of a token has in a slot


# By what was measured with int4.
BF16 = Pace(
    memory=0, tile=0.12, token=0.0016, split_bytes=3e6, alone=(1.3, 1.1), tile_of_many=0.1, token_of_many=0.0024,
    most_tokens=256, deep_tokens=128, token_bytes=2,
)  # fmt: skip
# Likewise with w4a8.
FP8 = Pace(
    memory=0.135, tile=0.01, token=0.0018, split_bytes=5e6, alone=(1.36, 1.3), tile_of_many=0.15, token_of_many=0.001,
    most_tokens=128, deep_tokens=128, token_bytes=1,
)  # fmt: skip


def plan_for(tokens: int, out: int, size: int, *, pace: Pace = BF16, gated: bool = False) -> Plan:
    """The plan of a shape that `supports` accepts: the one that takes the least time."""
    columns = size // HOPPER_COLUMNS

    def microseconds(plan: Plan) -> float:
        each = max(pace.memory, pace.tile + pace.token * tokens)
        if plan.workers == 1:  # nobody multiplies while it decodes, but with two tiles it has more to do meanwhile
            each *= pace.alone[plan.stack - 1]
        each *= columns // plan.splits * (plan.rows // HOPPER_ROWS)
        # Parts are written, and read again.
        added = plan.splits * padded(tokens) * out * 8 / pace.split_bytes if plan.splits > 1 else 0
        pieces = out // plan.rows * plan.splits
        return (
            _rounds(pieces, plan) * each
            + 0.7 * -(-pieces // num_sms())
            + _handed_over(pieces, padded(tokens), plan)
            + added
        )

    return min(plans(tokens, out, size, gated=gated), key=microseconds)


def plans(tokens: int, out: int, size: int, *, gated: bool = False) -> Iterator[Plan]:
    """All that `plan_for` chooses from."""
    columns = size // HOPPER_COLUMNS
    for workers, stack in ((2, 2), (1, 2)) if gated else ((2, 2), (2, 1), (1, 2), (1, 1)):
        if out % (workers * stack * HOPPER_ROWS):
            continue
        # Only where tiles are too few for the chip: what is added to a wide result is more than what is gained.
        few = not gated and out // (workers * stack * HOPPER_ROWS) < num_sms()
        for splits in [n for n in range(1, MAX_SPLITS + 1) if columns % n == 0] if few else [1]:
            yield Plan(workers, stack, splits=splits)
        # Up to 16 tokens memory sets the pace, and layers may be graphs, of which nobody knows what runs side by side.
        if tokens > 16:
            yield Plan(workers, stack, even=True)


def plan_for_many(tokens: int, out: int, size: int, *, pace: Pace = BF16) -> Plan:
    """The plan for more tokens than `supports` accepts."""

    def microseconds(plan: Plan) -> float:
        assert plan.tokens is not None
        each = max(pace.memory, pace.tile_of_many + pace.token_of_many * plan.tokens)
        pieces = out // plan.rows * -(-tokens // plan.tokens)
        work = _rounds(pieces, plan) * (plan.rows // HOPPER_ROWS) * size // HOPPER_COLUMNS * each
        return work + _handed_over(pieces, plan.tokens, plan)

    return min(plans_for_many(tokens, out, pace=pace), key=microseconds)


def plans_for_many(tokens: int, out: int, *, pace: Pace = BF16) -> Iterator[Plan]:
    """All that `plan_for_many` chooses from."""
    workers = 2 if out % (2 * HOPPER_ROWS) == 0 else 1
    for pieces in range(-(-tokens // pace.most_tokens), -(-tokens // FEWEST_TOKENS) + 1):
        width = padded(-(-tokens // pieces))
        depth = HOPPER_COLUMNS if width <= pace.deep_tokens else CHUNK
        for even in (False, True):
            yield Plan(workers=workers, stack=1, tokens=width, depth=depth, even=even)


def _rounds(pieces: int, plan: Plan) -> float:
    """Pieces that the block that has most of them works through."""
    return pieces / num_sms() if plan.even else -(-pieces // num_sms())


def _handed_over(pieces: int, tokens: int, plan: Plan) -> float:
    """Microseconds that it takes blocks to share the pieces that are left: sums go through memory, and from block to
    block where several have one."""
    left = pieces % num_sms()
    if not plan.even or not left:
        return 0
    return plan.rows * tokens * 4 / 11e3 + 2 * (-(-num_sms() // left) - 1)


def ring_slots(tokens: int, weight: Packed, plan: Plan) -> int:
    """Slots of the ring of a block: as many as fit, if the plan does not say."""
    grouping, pace = grouping_of(weight), pace_of(weight)
    words = 0 if grouping is None else grouping.words
    width = plan.tokens or padded(tokens)
    weights = plan.rows * (plan.depth * bits(weight.coding) // 8 + 4 * words)
    slot = weights + width * plan.depth * pace.token_bytes
    beside = gpu_w4a8_zeros.size(plan.workers, plan.stack, width) if weight.layout == "hopper8" else 0
    return plan.slots or min((SHARED_BYTES - beside) // slot, MOST_BARRIERS)


def pace_of(weight: Packed) -> Pace:
    return FP8 if weight.layout == "hopper8" else BF16
