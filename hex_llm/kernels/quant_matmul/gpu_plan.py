"""How a product with a weight in few bits is cut on Hopper (`gpu`)."""

from dataclasses import dataclass

from hex_llm.kernels.chain import padded
from hex_llm.kernels.hopper import MOST_BARRIERS, SHARED_BYTES, num_sms
from hex_llm.kernels.quant_matmul.gpu_layout import CHUNK, grouping_of
from hex_llm.kernels.quant_matmul.rows import TYPES
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, HOPPER_ROWS, Packed, bits

MAX_SPLITS = 8
FEWEST_TOKENS, MOST_TOKENS = 64, 256  # of a piece of work, where tokens are cut


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


def plan_for(tokens: int, out: int, size: int, *, gated: bool = False) -> Plan:
    """The plan of a shape that `supports` accepts: the one that takes the least time, by what was measured."""
    columns = size // HOPPER_COLUMNS

    def microseconds(plan: Plan) -> float:
        each = 0.12 + 0.0016 * tokens  # of a tile
        if plan.workers == 1:  # nobody multiplies while it decodes, but with two tiles it has more to do meanwhile
            each *= 1.3 if plan.stack == 1 else 1.1
        each *= columns // plan.splits * (plan.rows // HOPPER_ROWS)
        # Parts are written, and read again.
        added = plan.splits * padded(tokens) * out * 8 / 3e6 if plan.splits > 1 else 0
        pieces = out // plan.rows * plan.splits
        return (
            _rounds(pieces, plan) * each
            + 0.7 * -(-pieces // num_sms())
            + _handed_over(pieces, padded(tokens), plan)
            + added
        )

    def splits(workers: int, stack: int) -> list[int]:
        """Only where tiles are too few for the chip: what is added to a wide result is more than what is gained."""
        few = not gated and out // (workers * stack * HOPPER_ROWS) < num_sms()
        return [n for n in range(1, MAX_SPLITS + 1) if columns % n == 0] if few else [1]

    shapes = ((2, 2), (1, 2)) if gated else ((2, 2), (2, 1), (1, 2), (1, 1))
    plans = [
        Plan(workers=w, stack=s, splits=n, even=even)
        for w, s in shapes
        for n in splits(w, s)
        # Up to 16 tokens memory sets the pace, and layers may be graphs, of which nobody knows what runs side by side.
        for even in ((False, True) if n == 1 and tokens > 16 else (False,))
    ]
    return min((plan for plan in plans if out % plan.rows == 0), key=microseconds)


def plan_for_many(tokens: int, out: int, size: int) -> Plan:
    """The plan for more tokens than `supports` accepts."""
    workers = 2 if out % (2 * HOPPER_ROWS) == 0 else 1
    tiles = out // (workers * HOPPER_ROWS)

    def microseconds(plan: Plan, pieces: int) -> float:
        assert plan.tokens is not None
        each = 0.1 + 0.0024 * plan.tokens  # of a tile
        work = _rounds(tiles * pieces, plan) * workers * size // HOPPER_COLUMNS * each
        return work + _handed_over(tiles * pieces, plan.tokens, plan)

    def candidates(pieces: int) -> list[tuple[float, Plan]]:
        width = padded(-(-tokens // pieces))
        depth = HOPPER_COLUMNS if width <= 128 else CHUNK
        plans = [Plan(workers=workers, stack=1, tokens=width, depth=depth, even=even) for even in (False, True)]
        return [(microseconds(plan, pieces), plan) for plan in plans]

    counts = range(-(-tokens // MOST_TOKENS), -(-tokens // FEWEST_TOKENS) + 1)
    return min((each for pieces in counts for each in candidates(pieces)), key=lambda each: each[0])[1]


def plan_w4a8(tokens: int, out: int, size: int, *, gated: bool = False) -> Plan:
    """As `plan_for`, for tokens in 8 bits. By arithmetic: nothing of it was measured yet."""
    columns = size // HOPPER_COLUMNS
    shapes = ((2, 2), (1, 2)) if gated else ((2, 2), (2, 1), (1, 2), (1, 1))

    def microseconds(plan: Plan) -> float:
        each = _w4a8_tile(tokens) * (1 if plan.workers == 2 else 1.3)
        pieces = out // plan.rows * plan.splits
        added = plan.splits * tokens * out * 8 / 3e6 if plan.splits > 1 else 0
        work = columns // plan.splits * (plan.rows // HOPPER_ROWS) * each
        return _rounds(pieces, plan) * work + 0.7 * -(-pieces // num_sms()) + _handed_over(pieces, tokens, plan) + added

    def splits(rows: int) -> list[int]:
        few = not gated and out // rows < num_sms()
        return [n for n in range(1, MAX_SPLITS + 1) if columns % n == 0] if few else [1]

    plans = [
        Plan(workers=w, stack=s, splits=n, even=even)
        for w, s in shapes
        for n in splits(w * s * HOPPER_ROWS)
        for even in ((False, True) if n == 1 and tokens > 16 else (False,))
    ]
    return min((plan for plan in plans if out % plan.rows == 0), key=microseconds)


def plan_w4a8_for_many(tokens: int, out: int, size: int) -> Plan:
    """As `plan_for_many`, for tokens in 8 bits."""
    workers = 2 if out % (2 * HOPPER_ROWS) == 0 else 1
    del tokens, size
    return Plan(workers=workers, stack=1, tokens=MOST_TOKENS)


def _w4a8_tile(tokens: int) -> float:
    """Microseconds: what memory takes to give it, or tensor cores, with what scales take."""
    return max(0.135, 0.03 + 0.0011 * tokens)


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
    grouping = grouping_of(weight)
    words = 0 if grouping is None else grouping.words
    row = plan.depth * bits(weight.coding) // 8 + 4 * words
    width = plan.tokens or padded(tokens)
    if weight.coding in TYPES:
        slot = plan.rows * row + width * plan.depth + 4 * sums_kept(width)
    else:
        slot = plan.rows * row + width * plan.depth * 2
    return plan.slots or min(SHARED_BYTES // slot, MOST_BARRIERS)


def sums_kept(tokens: int) -> int:
    """Places in a slot for a sum of each of so many tokens in 8 bits: copies begin at multiples of 128 bytes."""
    return -(-tokens // 32) * 32
