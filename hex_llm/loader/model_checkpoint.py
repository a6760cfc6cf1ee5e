"""A folder's tensors, under the names that a family's weights are declared with."""

from pathlib import Path

from hex_llm.loader.checkpoint import Checkpoint, open_checkpoint
from hex_llm.loader.text_part import text_part
from hex_llm.models.registry import Family


def open_model(folder: Path, family: Family) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    return text_part(checkpoint) if family.multimodal else checkpoint
