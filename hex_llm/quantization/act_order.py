"""Columns that were sorted by how much they matter before they were put into groups, and then laid back.

So the columns of a group are anywhere, and a tensor says of each which group it belongs to.
"""

import numpy as np

from hex_llm.errors import CheckpointError
from hex_llm.quantization.method import Tensor


def order_of(groups: Tensor, group: int) -> np.ndarray:
    """[in] int32: columns such that those of a group follow each other."""
    of_column = np.asarray(groups[slice(None),])
    columns = np.arange(len(of_column), dtype=np.int32)
    if np.all(of_column == -1):  # as compressed-tensors leaves it where there was nothing to sort
        return columns
    order = np.argsort(of_column, kind="stable").astype(np.int32)
    if not np.array_equal(of_column[order], columns // group):
        raise CheckpointError(f"Tensor {groups.name} in {groups.path} does not put {group} columns into each group.")
    return order


def check_unsorted(groups: Tensor, group: int) -> None:
    of_column = np.asarray(groups[slice(None),])
    if not np.array_equal(of_column, np.arange(len(of_column)) // group):
        raise CheckpointError(
            f"Tensor {groups.name} in {groups.path} has columns in an order of their own, and the config says that "
            "there is none."
        )
