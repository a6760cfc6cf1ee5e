"""Damaged weights (F19): exit code 3, a line that names the file and the tensor, and nothing on a device before."""

import json
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.loader.config_json import parse_config
from hex_llm.loader.weights import load
from hex_llm.models.llama import Llama
from hex_llm.parallel.mesh import make_mesh
from tests.checkpoints import llama_config, random_tensors, write_llama, write_tensors
from tests.download.fixtures import running, stand_in
from tests.faults.starts import End, refused, server_end, slowest
from tests.faults.suite import record, sized
from tests.quantization.writers import KINDS as FORMATS
from tests.quantization.writers import write

__all__ = ["running", "stand_in"]  # fixtures

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
UP, K = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"
EXTRA = "model.layers.7.mlp.up_proj.weight"
LOADED = "a NaN"  # which only shows when the numbers are read
SMALL = ("--max_model_len=64", "--num_blocks=64", "--max_decode_seqs=2", "--no-warmup")


def tensors() -> dict[str, np.ndarray]:
    return random_tensors(llama_config())


def contents(folder: Path) -> tuple[dict, bytes]:
    """The header of a file and what follows it."""
    content = (folder / FILE).read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def write_contents(folder: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + data)


def holds(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / FILE).write_bytes(content)


def cut(folder: Path, length: int) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:length])


def cut_half(folder: Path) -> None:
    cut(folder, (folder / FILE).stat().st_size // 2)


def add_bytes(folder: Path) -> None:
    with (folder / FILE).open("ab") as file:
        file.write(b"\0" * 7)


def overlap(folder: Path) -> None:
    header, data = contents(folder)
    header[UP]["data_offsets"] = header["model.layers.1.mlp.gate_proj.weight"]["data_offsets"]
    write_contents(folder, header, data)


def bad_type(folder: Path) -> None:
    header, data = contents(folder)
    header[UP]["dtype"] = "F33"
    write_contents(folder, header, data)


def one_row_more(folder: Path) -> None:
    write_tensors(folder, tensors() | {K: np.zeros((33, 64), np.float32)})


def missing(folder: Path) -> None:
    left = tensors()
    del left[UP]
    write_tensors(folder, left)


def extra(folder: Path) -> None:
    write_tensors(folder, tensors() | {EXTRA: tensors()[UP]})


def missing_shard(folder: Path) -> None:
    (folder / FILE).unlink()
    write_tensors(folder, tensors(), num_files=2)
    (folder / LAST).unlink()


def twice(folder: Path) -> None:
    (folder / FILE).unlink()
    write_tensors(folder, tensors(), num_files=2)
    (folder / INDEX).unlink()
    shutil.copy(folder / FIRST, folder / "model-00003-of-00003.safetensors")


def not_a_number(folder: Path) -> None:
    poisoned = tensors()
    poisoned["model.norm.weight"][3] = float("nan")
    write_tensors(folder, poisoned)


def without_zeros(folder: Path) -> None:
    """Of AWQ."""
    source = write_llama(folder.parent / "source", hidden_size=128, intermediate_size=128)
    shutil.rmtree(folder)
    write(source, folder, FORMATS["awq"])
    packed = load_file(folder / FILE)
    del packed["model.layers.1.mlp.up_proj.qzeros"]
    save_file(packed, folder / FILE, {"format": "pt"})


# What is done to a folder, and what the line that refuses it must name.
DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "half of the file": (cut_half, [FILE, "tensor model."]),
    "the last byte cut": (lambda folder: cut(folder, -1), [FILE, "tensor model."]),
    "a cut in the header": (lambda folder: cut(folder, 40), [FILE]),
    "an empty file": (holds(b""), [FILE]),
    "seven bytes": (holds(b"1234567"), [FILE]),
    "bytes after the end": (add_bytes, [FILE, "7 bytes more"]),
    "a header of 2^60 bytes": (holds(struct.pack("<Q", 2**60) + b"{}"), [FILE, "header"]),
    "a web page": (holds(b"<!DOCTYPE html><html>404</html>"), [FILE, "web page"]),
    "an LFS pointer": (holds(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), [FILE, "git lfs pull"]),
    "tensors that overlap": (overlap, [FILE, "overlaps"]),
    "an unknown type": (bad_type, [FILE, UP, "F33"]),
    "a row more": (one_row_more, [FILE, K, "[33, 64]", "[32, 64]"]),
    "a tensor missing": (missing, [UP]),
    "a tensor too many": (extra, [EXTRA]),
    "a shard missing": (missing_shard, [LAST, INDEX]),
    "a shard twice": (twice, [FIRST, "model-00003-of-00003.safetensors", "Tensor "]),
    "AWQ without zeros": (without_zeros, ["model.layers.1.mlp.up_proj.qzeros"]),
    LOADED: (not_a_number, [FILE, "model.norm.weight", "NaN"]),
}


def damaged(tmp_path: Path, kind: str) -> Path:
    folder = write_llama(tmp_path / kind.replace(" ", "-"))
    DAMAGE[kind][0](folder)
    return folder


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def check(kind: str, end: End) -> None:
    assert end.code == 3, end.said
    assert "\n" not in end.said
    for word in DAMAGE[kind][1]:
        assert word in end.said
    assert end.within(30)


def test_damaged_weights_are_named_before_anything_is_on_a_device(tmp_path, capsys, monkeypatch):
    copies, real = [], jax.make_array_from_callback

    def copy(*arguments, **options):
        copies.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(jax, "make_array_from_callback", copy)
    ends, left = {}, open_files() + threading.active_count()
    for kind in DAMAGE:
        folder = damaged(tmp_path, kind)
        before = sorted(tmp_path.rglob("*"))
        ends[kind] = refused(capsys, str(folder), *SMALL)
        check(kind, ends[kind])
        assert kind == LOADED or not copies, f"{kind} was found after {len(copies)} copies to a device"
        assert sorted(tmp_path.rglob("*")) == before
    assert open_files() + threading.active_count() <= left + 2
    record("F19", f"{len(ends)} of {len(DAMAGE)} damaged files end with exit 3, {slowest(ends)}; all but the NaN"
                  " before the first copy to a device")  # fmt: skip


def test_a_whole_server_ends_with_the_same_code_and_line(tmp_path):
    kinds = sized(["half of the file", LOADED], [*DAMAGE])
    ends = {kind: server_end(f"--model={damaged(tmp_path, kind)}", "--port=0", *SMALL) for kind in kinds}
    for kind, end in ends.items():
        check(kind, end)
    record("F19", f"{len(ends)} of {len(kinds)} servers end with exit 3, {slowest(ends)}")


def test_a_bit_that_flipped_on_the_way_is_found_by_the_sum_that_the_source_tells(tmp_path, capsys, stand_in):
    shutil.copytree(write_llama(tmp_path / "model"), stand_in.hub("faults/flipped"), dirs_exist_ok=True)
    stand_in.set_faults({"match": FILE, "flip": True, "times": 1000})
    end = refused(capsys, "faults/flipped", f"--download_dir={tmp_path / 'cache'}")
    assert end.code == 6
    assert FILE in end.said
    assert "sha256" in end.said
    assert not list(tmp_path.rglob(f"cache/**/{FILE}"))
    record("F19", "a flipped bit is found by the source's sha256: exit 6, no file; in a folder without sums it is not")


def test_weights_of_two_types_are_those_of_one(tmp_path):
    rounded = {name: each.astype(ml_dtypes.bfloat16) for name, each in tensors().items()}
    mixed = {name: each.astype(np.float32) if "norm" in name else each for name, each in rounded.items()}
    arch = parse_config(llama_config(), "config.json").arch
    loaded = []
    for weights in (rounded, mixed):
        write_tensors(tmp_path, weights)
        loaded.append(load(Llama, arch, open_checkpoint(tmp_path), make_mesh(1), jnp.bfloat16))
    assert all(map(np.array_equal, *map(jax.tree.leaves, loaded)))
    assert len({each.dtype for each in mixed.values()}) == 2
    record("F19", "a mix of bfloat16 and float32 loads, to the same weights as in one type")
