"""Weights in few bits onto the devices that have a share of them: read, and decoded and packed there."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from hex_llm.errors import CheckpointError
from hex_llm.kernels.quant_matmul.layouts import pack
from hex_llm.kernels.quant_matmul.weight import Codes, Packed
from hex_llm.loader.blocks import Block, blocks, pairs_apart, plain_matrix, read_plain, share_rows
from hex_llm.loader.values import FLOAT8, Check, check_finite
from hex_llm.models.few_bits import Local, from_shares, local_share, module_of
from hex_llm.models.split import Split
from hex_llm.models.weights import Part, WeightSpec
from hex_llm.quantization.fp8 import read_input_scale
from hex_llm.quantization.method import Arrays, Format, Numbers, Share, Tensor
from hex_llm.quantization.online import PLAIN, Online
from hex_llm.safetensors_file import FLOATS


class Piece(NamedTuple):
    """Where a block of codes comes from, and where it goes."""

    rows: slice  # of what is decoded
    columns: slice
    to_rows: slice  # of the device's share
    to_columns: slice
    head_dim: int | None  # where the dimensions of a head that turn together are neighbours


def load_packed(
    spec: WeightSpec,
    numbers: Numbers,
    split: Split,
    tensors: Mapping[str, Tensor],
    mesh: Mesh,
    dtype: np.dtype,
    check: Check,
    advance: Callable[[int], None],
) -> Packed:
    """For tokens of `dtype`."""
    local = local_share(spec, split, numbers)
    if isinstance(numbers, Online) and numbers.group is not None:
        numbers = dataclasses.replace(numbers, group=local.group)
    order, input_scale = _order(spec, numbers, split, tensors), _input_scale(spec, numbers, split, tensors)

    def share(number: int, device: Any) -> Packed:
        found = list(_read(spec, numbers, split, tensors, number, check, advance))  # none, where all is filled up
        pieces, arrays = tuple(piece for piece, _ in found), tuple(each for _, each in found)
        own = None if order is None else _own_order(order, spec, split, number)
        given = jax.device_put((arrays, own, input_scale), device)
        with jax.default_device(device):  # where there is nothing that would say so
            return _assemble(*given, numbers=numbers, local=local, pieces=pieces, dtype=dtype)

    return from_shares(on_each_device(mesh, share), spec, mesh)


def on_each_device(mesh: Mesh, make: Callable[[int, Any], Packed]) -> list[Packed]:
    """What `make` returns for each device of this host, given its number in the mesh."""
    host = jax.process_index()
    return [make(i, device) for i, device in enumerate(mesh.devices.flat) if device.process_index == host]


def _read(
    spec: WeightSpec,
    numbers: Numbers,
    split: Split,
    tensors: Mapping[str, Tensor],
    device: int,
    check: Check,
    advance: Callable[[int], None],
) -> Iterator[tuple[Piece, Arrays]]:
    """A device's share, piece by piece; the arrays of a piece are those of all experts, where there are some."""
    row = 0
    for part in spec.parts:
        head_dim = split.arch.head_dim if part.neighbours and not isinstance(numbers, Online) else None
        for block in blocks(part, split, device):
            experts = range(split.arch.num_experts if spec.stack else 1)
            shares = [_read_one(spec, part, numbers, split, tensors, block, i, check) for i in experts]
            first = shares[0]
            arrays = {
                name: np.stack([each.arrays[name] for each in shares]) if spec.stack else array
                for name, array in first.arrays.items()
            }
            advance(sum(array.nbytes for array in arrays.values()))
            to_rows, to_columns = block.place
            to_rows = slice(row + to_rows.start, row + to_rows.stop)
            yield Piece(first.rows, first.columns, to_rows, to_columns, head_dim), arrays
        row += share_rows(part, split)


def _read_one(
    spec: WeightSpec,
    part: Part,
    numbers: Numbers,
    split: Split,
    tensors: Mapping[str, Tensor],
    block: Block,
    expert: int,
    check: Check,
) -> Share:
    if isinstance(numbers, Online):
        values = read_plain(part, split, plain_matrix(spec, part, tensors, expert), block)
        check_finite(tensors[part.name.format(expert)], values, check)
        return Share({PLAIN: values}, slice(0, values.shape[0]), slice(0, values.shape[1]))
    module, (columns,) = _module(spec, part).format(expert), block.columns
    share = _format(numbers).read(tensors, module, expert if spec.stack == "joined" else None, block.rows, columns)
    for name, array in share.arrays.items():
        if array.dtype in (*FLOATS, FLOAT8):
            check_finite(tensors[f"{module}.{name}"], array, check)
    return share


@functools.partial(jax.jit, static_argnames=("numbers", "local", "pieces", "dtype"))
def _assemble(
    arrays: tuple[Mapping[str, Array], ...],
    order: Array | None,
    input_scale: Array | None,
    *,
    numbers: Numbers,
    local: Local,
    pieces: tuple[Piece, ...],
    dtype: np.dtype,
) -> Packed:
    """One compiled function for all layers: their pieces are alike."""
    decode = numbers.decode if local.experts is None else jax.vmap(numbers.decode)
    decoded = [_cut(decode(each), piece, local) for each, piece in zip(arrays, pieces, strict=True)]
    shapes = local.codes(numbers)

    def joined(name: str, columns: Callable[[Piece], slice]) -> Array:
        # What no piece covers is of scale 0.
        whole = jnp.zeros(getattr(shapes, name).shape, getattr(shapes, name).dtype)
        for codes, piece in zip(decoded, pieces, strict=True):
            whole = whole.at[..., piece.to_rows, columns(piece)].set(getattr(codes, name))
        return whole

    def groups(piece: Piece) -> slice:
        if local.groups == 1:
            return slice(0, 1)
        return slice(piece.to_columns.start // local.group, piece.to_columns.stop // local.group)

    codes = Codes(
        codes=joined("codes", lambda piece: piece.to_columns),
        scale=joined("scale", groups),
        zero=joined("zero", groups) if numbers.has_zero else None,
        order=order,
        input_scale=input_scale,
        coding=numbers.coding,
    )
    return pack(codes, dtype)


def _cut(codes: Codes, piece: Piece, local: Local) -> Codes:
    """The rows and columns that are wanted, with a scale for each of the share's own groups."""
    size = codes.shape[-1]

    def rows(array: Array) -> Array:
        own = array[..., piece.rows, :]
        return own if piece.head_dim is None else pairs_apart(own, piece.head_dim)

    def groups(array: Array) -> Array:
        if local.groups == 1:
            return rows(array)
        repeats = size // array.shape[-1] // local.group
        first, last = (border // local.group for border in (piece.columns.start, piece.columns.stop))
        return rows(jnp.repeat(array, repeats, axis=-1)[..., first:last])

    return dataclasses.replace(
        codes,
        codes=rows(codes.codes[..., piece.columns]),
        scale=groups(codes.scale),
        zero=None if codes.zero is None else groups(codes.zero),
    )


def _order(spec: WeightSpec, numbers: Numbers, split: Split, tensors: Mapping[str, Tensor]) -> np.ndarray | None:
    """That of all columns, which all parts have in common."""
    if not numbers.has_order:
        return None
    (column,) = spec.parts[0].columns
    if column != "mlp" and split.size(column) != split.arch.sizes[column]:
        # Heads that are filled up lie between others, so that no number of a column would be the same here and there.
        raise CheckpointError(
            f"{spec.parts[0].name}: {split.arch.sizes[column]} columns in an order of their own cannot be shared by "
            f"{split.num_devices} devices."
        )
    return _format(numbers).order(tensors, _module(spec, spec.parts[0]))


def _own_order(order: np.ndarray, spec: WeightSpec, split: Split, device: int) -> np.ndarray:
    """What a device has of it. Columns that fill up are any: they are of scale 0."""
    (column,) = spec.parts[0].columns
    own = np.zeros(split.shard(column), np.int32)
    for run in split.runs(column, device):
        own[run.at : run.at + run.stop - run.start] = order[run.start : run.stop]
    return own


def _input_scale(spec: WeightSpec, numbers: Numbers, split: Split, tensors: Mapping[str, Tensor]) -> np.ndarray | None:
    """Tokens are divided once for all parts and experts, and by so much that they fit each."""
    if not numbers.has_input_scale:
        return None
    experts = range(split.arch.num_experts if spec.stack else 1)
    modules = [_module(spec, part).format(i) for part in spec.parts for i in experts]
    scales = [read_input_scale(tensors, module) for module in modules]
    largest = int(np.argmax(scales))  # or the first that is NaN
    if not 0 < scales[largest] < np.inf:
        raise CheckpointError(
            f"{modules[largest]}.input_scale is {scales[largest]}, not a finite number above 0 to divide tokens by."
        )
    return scales[largest]


def _module(spec: WeightSpec, part: Part) -> str:
    module = module_of(spec, part)
    assert module is not None, f"{part.name} is not in few bits"
    return module


def _format(numbers: Numbers) -> Format:
    assert not isinstance(numbers, Online), "what is made while loading lies in no format"
    return numbers  # pyright: ignore[reportReturnType]
