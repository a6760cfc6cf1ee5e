"""The language model's part of a checkpoint that also has a vision tower, which is not served."""

import logging
import math

from hex_llm.loader.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

# As old and new checkpoints call it, and what the language model alone would.
_TEXT = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
_OTHER = ("vision_tower.", "vision_model.", "multi_modal_projector.")


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under the language model's own names, without what belongs to images. Says what it leaves out."""
    tensors, skipped = {}, []
    for name, tensor in checkpoint.items():
        if name.removeprefix("model.").startswith(_OTHER):
            skipped.append(tensor)
            continue
        start = next((start for start in _TEXT if name.startswith(start)), "")
        tensors[_TEXT.get(start, "") + name.removeprefix(start)] = tensor
    if skipped:
        size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in skipped)
        logger.warning(
            "Only text is served: %d tensors of the vision tower and its projector (%.2f GB) are not loaded.",
            len(skipped),
            size / 1e9,
        )
    return checkpoint.under(tensors)
