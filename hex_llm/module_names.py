"""What modules and tensors of a language model are called, also within a model that sees."""

# As old and new checkpoints of models that see call it, and what the language model alone would.
_TEXT = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
_IMAGES = ("vision_tower.", "vision_model.", "multi_modal_projector.")


def own_name(name: str) -> str | None:
    """The language model's own name for it; None for what belongs to images."""
    if name.removeprefix("model.").startswith(_IMAGES):
        return None
    start = next((start for start in _TEXT if name.startswith(start)), "")
    return _TEXT.get(start, "") + name.removeprefix(start)


def all_names(module: str) -> tuple[str, ...]:
    """A module's own name, and those it has in a model that also sees."""
    return module, f"language_model.{module}", f"model.language_model.{module.removeprefix('model.')}"
