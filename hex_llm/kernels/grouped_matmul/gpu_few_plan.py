"""How the products of few tokens with the weights of experts are cut on Hopper."""

from dataclasses import dataclass

from hex_llm.kernels.chain import padded
from hex_llm.kernels.grouped_matmul.gpu_left import Left
from hex_llm.kernels.hopper import MMA_ROWS, MOST_BARRIERS, SHARED_BYTES, num_sms
from hex_llm.kernels.quant_matmul.weight import HOPPER_COLUMNS, Matrix, Packed

MAX_SPLITS = 8


@dataclass(frozen=True)
class Plan:
    """How the product with a weight of every expert is cut."""

    rows: int  # of the weight, for one block at a time; of the gate and up together
    depth: int  # columns of the weight in one slot of the ring
    splits: int = 1  # parts of F, each a piece of work of its own
    stack: int = 1  # weights of down that a warpgroup multiplies side by side, as it does gate and up: neighbours
    slots: int | None = None  # of the ring; as many as fit if not given
    blocks: int | None = None  # at a time; one for each SM if not given


def plans_for(tokens: int, touched: int, gate_up: Matrix, down: Matrix) -> tuple[Plan, Plan]:
    """For the product with each, where at most so many experts are touched."""
    width, size = down.shape[1], gate_up.shape[1] // 2
    if isinstance(gate_up, Packed):
        return coded_gate_up_plan(touched, size), coded_down_plan(down.shape[2], width)
    return gate_up_plan(tokens, size, width), down_plan(tokens, size, width)


def gate_up_plan(tokens: int, size: int, width: int) -> Plan:
    """For weights [E, 2F, D]: `size` is F, `width` D."""
    rows = next(rows for rows in _heights(tokens, least=2 * MMA_ROWS) if size % (rows // 2) == 0)
    return Plan(rows=rows, depth=_depth(tokens, rows, width))


def down_plan(tokens: int, size: int, width: int) -> Plan:
    """For weights [E, D, F]: `size` is F, `width` D."""
    found = []
    for rows in _heights(tokens, least=MMA_ROWS):
        if width % rows == 0:
            depth = _depth(tokens, rows, size)
            for splits in range(1, MAX_SPLITS + 1):
                if size // depth % splits == 0:
                    pieces = width // rows * splits
                    # Whole rounds of all SMs; of those that are as good the first, which reads the least of `x`.
                    found.append((pieces / (-(-pieces // num_sms()) * num_sms()), Plan(rows, depth, splits)))
    enough = min(0.7, max(share for share, _ in found))
    return next(plan for share, plan in found if share >= enough)


def _heights(tokens: int, least: int) -> list[int]:
    """Rows for a block to try, the better first: a block reads all of `x` for each of its tiles, and tall ones keep
    that well below what it reads of the weight."""
    wanted = max(least, next((rows for rows in (64, 128) if rows >= 2 * tokens), 256))
    return [rows for rows in (256, 128, 64) if least <= rows <= wanted]


def _depth(tokens: int, rows: int, size: int) -> int:
    """Deep slots are the faster ones, where enough of them fit."""
    return 128 if size % 128 == 0 and rows + tokens <= 192 else 64


def coded_gate_up_plan(touched: int, size: int) -> Plan:
    """For codes of weights [E, 2F, D], of which so many experts are touched: `size` is F."""
    plans = [Plan(2 * n * MMA_ROWS, HOPPER_COLUMNS) for n in (2, 3, 1) if size % (n * MMA_ROWS) == 0]
    return min(plans, key=lambda plan: _decoding(2 * size // plan.rows * touched, plan.rows, stack=2))


def coded_down_plan(size: int, width: int) -> Plan:
    """For codes of weights [E, D, F]: `size` is the columns that there are codes of, `width` D."""
    columns = size // HOPPER_COLUMNS
    plans = [
        Plan(workers * stack * MMA_ROWS, HOPPER_COLUMNS, splits, stack)
        for workers, stack in ((2, 2), (2, 1), (3, 1), (1, 2), (1, 1))
        if width % (workers * stack * MMA_ROWS) == 0
        for splits in range(1, MAX_SPLITS + 1)
        if columns % splits == 0
    ]

    def time(plan: Plan) -> float:
        return _decoding(width // plan.rows * plan.splits, plan.rows, plan.stack) / plan.splits

    # The fewest parts that are nearly as good: they are to be added. Of those, on the most SMs.
    best = min(map(time, plans))
    return min((plan for plan in plans if time(plan) <= 1.1 * best), key=lambda plan: (plan.splits, plan.rows))


def _decoding(pieces: int, rows: int, stack: int) -> float:
    """The time of so many pieces of work in tiles that a block decodes one after the other. A warpgroup alone is slow:
    nobody multiplies while it decodes."""
    tiles = rows // MMA_ROWS
    return -(-pieces // num_sms()) * tiles * (2 if tiles == stack else 1)


def ring_slots(tokens: int, wanted: int | None, left: Left) -> int:
    """Slots of the ring of a block: as many as fit, if no number is wanted."""
    return wanted or min(MOST_BARRIERS, SHARED_BYTES // (left.slot_bytes + padded(tokens) * left.depth * 2))
