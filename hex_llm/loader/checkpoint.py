"""A folder of safetensors files, of which nothing is read but the headers until a tensor is sliced."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from hex_llm.errors import CheckpointError
from hex_llm.model_files import WEIGHTS_INDEX, read_weight_map, weight_files
from hex_llm.quantization.method import Tensor
from hex_llm.safetensors_file import LazyTensor, read_header


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a model by name, whichever files they lie in."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]):
        self.folder = folder
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def under(self, tensors: Mapping[str, Tensor]) -> "Checkpoint":
        """Some of the tensors, under other names."""
        return Checkpoint(self.folder, tensors)

    def in_turn(self, needs: Sequence[Collection[str]]) -> Iterator[Sequence[int]]:
        """Which of those that need tensors have them, in portions: the files of one may be gone when the next comes."""
        yield range(len(needs))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies the header of every file, so that what follows can trust names, shapes and sizes."""
    index = folder / WEIGHTS_INDEX
    if index.exists():
        files = {*read_weight_map(index).values()}
    else:
        files = weight_files([path.name for path in folder.iterdir()], str(folder))
    for file in sorted(files):
        if not (folder / file).exists():
            raise CheckpointError(f"{folder / file} is missing, and {index.name} names it.")
    return Checkpoint(folder, gather(folder, sorted(files), lambda file: read_header(folder / file)))


def gather(folder: Path, files: Sequence[str], read: Callable[[str], Sequence[LazyTensor]]) -> dict[str, LazyTensor]:
    """The tensors of all files, which must be where the index says, if the folder has one."""
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        for tensor in read(file):
            if twin := tensors.get(tensor.name):
                raise CheckpointError(f"Tensor {tensor.name} is in both {twin.path} and {tensor.path}.")
            tensors[tensor.name] = tensor
    index = folder / WEIGHTS_INDEX
    for name, file in (read_weight_map(index) if index.exists() else {}).items():
        if name not in tensors or tensors[name].path.name != file:
            raise CheckpointError(f"{index} says that {file} holds {name}, but it does not.")
    return tensors
