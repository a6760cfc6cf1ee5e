"""A folder's tensors, under the names and in the types that a family's weights are declared with."""

from pathlib import Path

from hex_llm.loader.checkpoint import Checkpoint, open_checkpoint
from hex_llm.loader.mxfp4 import widened
from hex_llm.loader.text_part import text_part
from hex_llm.models.registry import Family


def open_model(folder: Path, family: Family) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    if family.multimodal:
        checkpoint = text_part(checkpoint)
    return widened(checkpoint) if "mxfp4" in family.widened_formats else checkpoint
