"""Where a dimension lives: the only place that knows which dimensions are split over which mesh axis."""

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hex_llm.parallel.mesh import TENSOR

RULES: dict[str, str | None] = {
    "vocab": TENSOR,
    "heads": TENSOR,  # query heads x head_dim
    "kv_heads": TENSOR,  # key and value heads x head_dim
    "sinks": TENSOR,  # query heads
    "mlp": TENSOR,
    "expert": None,
    "embed": None,
    "rank": None,
    "head": None,
}

# The same for arrays that are no weights.
WHOLE = PartitionSpec()  # every device has all of it
PAGES = PartitionSpec(None, None, TENSOR)  # [pages, 2, kv_heads, page_size, head_dim]
STAGED = PartitionSpec(None, None, None, TENSOR)  # [layers, blocks, 2, kv_heads, page_size, head_dim]
VOCABULARY = PartitionSpec(None, TENSOR)  # [rows, vocab]


def sharding(mesh: Mesh, dims: tuple[str, ...]) -> NamedSharding:
    """How an array with these dimensions is spread over the mesh."""
    return NamedSharding(mesh, PartitionSpec(*(RULES[dim] for dim in dims)))
