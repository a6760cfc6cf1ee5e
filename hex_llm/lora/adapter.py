"""An adapter that somebody has trained: checked in all that can be wrong with it, before any of it gets to a device.

It adds B(Ax) times its scaling to what a linear module makes of x.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from hex_llm.errors import AdapterError, CheckpointError
from hex_llm.lora.files import CONFIG, in_folder
from hex_llm.lora.peft_config import PeftConfig, read_config
from hex_llm.module_names import own_name
from hex_llm.safetensors_file import FLOATS, LazyTensor, read_header

logger = logging.getLogger(__name__)

# The sizes (in, out) of all modules that may be adapted, by their names in the base model's checkpoint.
type Modules = Mapping[str, tuple[int, int]]

_LONGEST_HEADER = 8 * 2**20
_LONGEST_MESSAGE = 500
_LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class Pair:
    """What is added to one module."""

    a: LazyTensor  # [rank, in]
    b: LazyTensor  # [out, rank]
    scaling: float

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        a, b = _values(self.a), _values(self.b)
        with np.errstate(over="ignore", invalid="ignore"):
            b *= np.float32(self.scaling)
        if not _usable(b):
            raise AdapterError(f"{_shown(self.b.name)} times its scaling of {self.scaling:g} is beyond bfloat16.")
        return a, b


@dataclass(frozen=True, slots=True)
class Adapter:
    """By the names of modules in the base model's checkpoint. Ranks may differ."""

    pairs: Mapping[str, Pair]

    def read(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """A [rank, in] and B [out, rank] times its scaling of each module, float32. AdapterError for NaN and infinity,
        and for files that are no longer those that were checked.
        """
        return {module: pair.read() for module, pair in self.pairs.items()}


def open_adapter(folder: Path, modules: Modules, max_rank: int) -> Adapter:
    """Reads the config and the headers in a folder; AdapterError for all that is wrong there."""
    with _refusals(folder):
        names = in_folder(folder)
        config = read_config(folder, max_rank)
        tensors = [tensor for name in names if name != CONFIG for tensor in read_header(folder / name, _LONGEST_HEADER)]
        halves = _halves(tensors)
        return Adapter({module: _pair(module, *halves[module], config, modules) for module in sorted(halves)})


@contextmanager
def _refusals(folder: Path) -> Iterator[None]:
    """Whoever asked for the adapter is told on one line, without where it lies here."""
    try:
        yield
    except CheckpointError as error:
        line = " ".join(str(error).replace(f"{folder}/", "").split())
        raise AdapterError(line[:_LONGEST_MESSAGE]) from None


def _halves(tensors: list[LazyTensor]) -> dict[str, tuple[str, dict[str, LazyTensor]]]:
    """What tensors there are for each module, and what they call it."""
    found: dict[str, tuple[str, dict[str, LazyTensor]]] = {}
    num_of_images = 0
    for tensor in tensors:
        match = _TENSOR.fullmatch(tensor.name)
        if match is None:
            raise AdapterError(f"{_shown(tensor.name)} is no A or B of a LoRA, which are all that is served.")
        name, half = match.groups()
        module = own_name(name)
        if module is None:
            num_of_images += 1
            continue
        _, halves = found.setdefault(module, (name, {}))
        if half in halves:
            raise AdapterError(f"{_shown(tensor.name)} and {_shown(halves[half].name)} are of the same module.")
        halves[half] = tensor
    if not found:
        raise AdapterError("The adapter has no tensors for the language model.")
    if num_of_images:
        logger.warning("Only text is served: %d tensors of an adapter are for images, and not read.", num_of_images)
    return found


def _pair(module: str, name: str, halves: Mapping[str, LazyTensor], config: PeftConfig, modules: Modules) -> Pair:
    if module not in modules:
        raise AdapterError(f"The adapter is also for {_shown(module)}, which is no module that is adapted here.")
    if not config.is_target(name):
        raise AdapterError(f"{CONFIG} does not have {_shown(name)} in target_modules, and there are tensors for it.")
    if len(halves) != 2:
        (half,) = halves
        raise AdapterError(f"The adapter has lora_{half} of {_shown(name)}, and not the other half.")
    size_in, size_out = modules[module]
    rank = config.rank_of(name)
    for tensor, shape in ((halves["A"], (rank, size_in)), (halves["B"], (size_out, rank))):
        if tensor.shape != shape:
            raise AdapterError(
                f"{_shown(tensor.name)} has shape {list(tensor.shape)}; with rank {rank}, a module of {size_in} inputs"
                f" and {size_out} outputs needs {list(shape)}."
            )
        if tensor.dtype not in FLOATS:
            known = ", ".join(map(str, FLOATS))
            raise AdapterError(f"{_shown(tensor.name)} has type {tensor.dtype}; {known} are read.")
    return Pair(halves["A"], halves["B"], config.scaling_of(name))


def _values(tensor: LazyTensor) -> np.ndarray:
    """A tensor as float32. It is read, not mapped: who cuts a mapped file short ends the process."""
    num_bytes = tensor.shape[0] * tensor.shape[1] * tensor.dtype.itemsize
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            content = file.read(num_bytes)
    except OSError as error:
        raise AdapterError(f"{tensor.path.name} cannot be read any more: {error.strerror}.") from None
    if len(content) != num_bytes:
        raise AdapterError(f"{tensor.path.name} was cut short after it was checked.")
    values = np.frombuffer(content, tensor.dtype).reshape(tensor.shape).astype(np.float32)
    if not _usable(values):
        raise AdapterError(f"{_shown(tensor.name)} holds NaN or infinity.")
    return values


def _usable(values: np.ndarray) -> bool:
    """Whether all are numbers, also once they are rounded to bfloat16: a 0 times infinity would be everybody's."""
    return bool(np.abs(values).max(initial=0.0) <= _LARGEST)


def _shown(name: str) -> str:
    """A name that somebody chose, in a message that stays one line."""
    text = ascii(name)[1:-1]
    return text if len(text) <= 160 else f"{text[:157]}..."
