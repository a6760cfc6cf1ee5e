"""Sizes of matrices that do not go with how they are said to be kept."""

from hex_llm.errors import CheckpointError
from hex_llm.model_fields import Fields


def read_group(fields: Fields, default: int | None = None) -> int | None:
    """Columns that have a scale in common, which files give as -1 where that is all; None: all."""
    group = fields.integer("group_size", default, smallest=-1)
    if not group:
        raise fields.refuse("group_size", "is 0, not -1 or a number of columns")
    return None if group == -1 else group


def check_group(module: str, size: int, group: int | None) -> None:
    if group is not None and size % group:
        raise CheckpointError(f"{module} has {size} columns, which groups of {group} do not divide.")


def check_words(module: str, what: str, size: int, run: int) -> None:
    if size % run:
        raise CheckpointError(f"{module} has {size} {what}, which words of {run} do not divide.")


def check_apart(module: str, experts: int | None, method: str) -> None:
    if experts is not None:
        raise CheckpointError(f"{module} has {experts} experts in one tensor, which is not read in {method}.")
