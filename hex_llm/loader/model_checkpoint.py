"""A model's tensors, under the names that a family's weights are declared with."""

from pathlib import Path
from typing import TYPE_CHECKING

from hex_llm.loader.checkpoint import Checkpoint, open_checkpoint
from hex_llm.loader.text_part import text_part
from hex_llm.models.registry import Family

if TYPE_CHECKING:
    from hex_llm.download.shards import Shards


def open_model(files: "Path | Shards", family: Family) -> Checkpoint:
    checkpoint = open_checkpoint(files) if isinstance(files, Path) else _open_streamed(files)
    return text_part(checkpoint) if family.multimodal else checkpoint


def _open_streamed(shards: "Shards") -> Checkpoint:
    # Not before: what downloads takes long to import, and most models are in a folder.
    from hex_llm.loader.streamed import open_streamed

    return open_streamed(shards)
