"""The language model's part of a checkpoint that also has a vision tower, which is not served."""

import logging
import math

from hex_llm.loader.checkpoint import Checkpoint
from hex_llm.module_names import own_name

logger = logging.getLogger(__name__)


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under the language model's own names, without what belongs to images. Says what it leaves out."""
    tensors, skipped = {}, []
    for name, tensor in checkpoint.items():
        own = own_name(name)
        if own is None:
            skipped.append(tensor)
        else:
            tensors[own] = tensor
    if skipped:
        size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in skipped)
        logger.warning(
            "Only text is served: %d tensors of the vision tower and its projector (%.2f GB) are not loaded.",
            len(skipped),
            size / 1e9,
        )
    return checkpoint.under(tensors)
