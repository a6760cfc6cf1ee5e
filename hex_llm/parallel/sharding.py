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
    "head": None,
}


def sharding(mesh: Mesh, dims: tuple[str, ...]) -> NamedSharding:
    """How an array with these dimensions is spread over the mesh."""
    return NamedSharding(mesh, PartitionSpec(*(RULES[dim] for dim in dims)))


def num_shards(mesh: Mesh, dim: str) -> int:
    """Into how many parts the mesh splits a dimension."""
    axis = RULES[dim]
    return 1 if axis is None else mesh.shape[axis]
