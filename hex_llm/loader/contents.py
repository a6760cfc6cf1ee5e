"""What a model's checkpoint must hold, and whether it does: all that names, shapes and types can tell."""

from typing import Any

import numpy as np

from hex_llm.errors import CheckpointError
from hex_llm.loader.checkpoint import Checkpoint
from hex_llm.models.arch import Arch
from hex_llm.models.few_bits import Quantization, kept, module_of
from hex_llm.models.weights import WeightSpec, specs
from hex_llm.quantization.method import Numbers, Stored
from hex_llm.quantization.online import Online
from hex_llm.safetensors_file import FLOATS

_COMPARED_ROWS = 64  # of two tensors that should be one


def check_checkpoint(
    model: type, arch: Arch, checkpoint: Checkpoint, quantization: Quantization | None = None
) -> list[str]:
    """Refuses a checkpoint whose names, shapes and types are not those that config.json calls for. Returns the names of
    what goes unused."""
    wanted = {name: kind for spec in specs(model, arch) for name, kind in stored(spec, arch, quantization).items()}
    if quantization is not None and all(kept(spec, quantization).numbers is None for spec in specs(model, arch)):
        raise CheckpointError(f"{checkpoint.folder}: {quantization.name} keeps none of this model's weights.")
    spare = _check_names(set(wanted), arch, checkpoint, quantization)
    for name, kind in wanted.items():
        _check_kind(name, kind, checkpoint)
    for spec in specs(model, arch):
        _check_orders(*kept(spec, quantization), checkpoint)
    _check_tie(arch, checkpoint)
    return spare


def stored(spec: WeightSpec, arch: Arch, quantization: Quantization | None) -> dict[str, Stored]:
    """The tensors that a checkpoint has of a weight, by name."""
    spec, numbers = kept(spec, quantization)
    if numbers is None or isinstance(numbers, Online):
        return {name: Stored(shape, FLOATS) for name, shape in spec.tensors(arch).items()}
    found: dict[str, Stored] = {}
    for part in spec.parts:
        module = module_of(spec, part)
        assert module is not None
        assert quantization is not None
        assert not isinstance(quantization, Online)
        out, size = sum(arch.sizes[row] for row in part.rows), arch.sizes[part.columns[0]]
        for name in [module.format(i) for i in range(arch.num_experts)] if spec.stack == "tensors" else [module]:
            form = quantization.format(name)
            if form is None or form != numbers:
                raise CheckpointError(f"{quantization.name} keeps {name} in another way than the experts before it.")
            found |= form.tensors(name, out, size, arch.num_experts if spec.stack == "joined" else None)
    return found


def _check_names(
    expected: set[str], arch: Arch, checkpoint: Checkpoint, quantization: Quantization | None
) -> list[str]:
    if missing := sorted(expected - checkpoint.keys()):
        raise CheckpointError(f"{checkpoint.folder} lacks {_listed(missing)} that config.json calls for.")
    extra = sorted(name for name in checkpoint.keys() - expected if not _harmless(name, arch))
    if quantization is None or isinstance(quantization, Online):
        spare = []
    else:
        spare = [name for name in extra if quantization.spare(checkpoint[name])]
    if extra := sorted(set(extra) - set(spare)):
        raise CheckpointError(f"{checkpoint.folder} has {_listed(extra)} that config.json has no place for.")
    return spare


def _check_kind(name: str, kind: Stored, checkpoint: Checkpoint) -> None:
    tensor = checkpoint[name]
    if kind.shape is not None and not kind.admits(tensor.shape):
        raise CheckpointError(
            f"Tensor {name} in {tensor.path} has shape {list(tensor.shape)}; config.json makes it {list(kind.shape)}."
        )
    if tensor.dtype not in kind.dtypes:
        known = [str(each) for each in kind.dtypes]
        raise CheckpointError(
            f"Tensor {name} in {tensor.path} is of type {tensor.dtype}; this version reads {_either(known)} there."
        )


def _check_orders(spec: WeightSpec, numbers: Numbers | None, checkpoint: Checkpoint) -> None:
    """Refuses parts of one weight whose columns come in different orders."""
    if numbers is None or isinstance(numbers, Online) or not numbers.has_order:
        return
    form: Any = numbers
    first, *others = [form.order(checkpoint, module_of(spec, part)) for part in spec.parts]
    if any(not np.array_equal(first, each) for each in others):
        names = " and ".join(part.name for part in spec.parts)
        raise CheckpointError(f"{names} are one weight here, but their columns have different orders.")


def _either(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _harmless(name: str, arch: Arch) -> bool:
    """Old Llama files carry the rotary frequencies, and tied ones may repeat the embedding as the head."""
    return name.endswith(".rotary_emb.inv_freq") or (arch.tied and name == "lm_head.weight")


def _check_tie(arch: Arch, checkpoint: Checkpoint) -> None:
    """A head of its own in a model whose head is the embedding: which of the two is meant cannot be told."""
    head = checkpoint.get("lm_head.weight")
    if not arch.tied or head is None:
        return
    embed, rows = checkpoint["model.embed_tokens.weight"], (slice(0, _COMPARED_ROWS),)
    if head.shape != embed.shape or not np.array_equal(head[rows], embed[rows]):
        raise CheckpointError(
            f"Tensor lm_head.weight in {head.path} differs from model.embed_tokens.weight, and tie_word_embeddings in "
            "config.json says that they are one."
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({shown})"
