"""Files are verified before they are read, and damage is told with the file and the tensor."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hex_llm.errors import CheckpointError
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.safetensors_file import read_header
from tests.checkpoints import llama_config, random_tensors, write_tensors

A = np.arange(24, dtype=np.float32).reshape(4, 6)


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_raw(path, header, data=b""):
    """A safetensors file as it is laid out, which the library would refuse to write wrongly."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.int64])
def test_a_slice_is_what_the_library_wrote(tmp_path, dtype):
    save_file({"a": A.astype(dtype), "b": A.T.copy().astype(dtype)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint) == {"a", "b"}
    tensor = checkpoint["b"]
    assert (tensor.shape, tensor.dtype) == ((6, 4), dtype)
    np.testing.assert_array_equal(tensor[2:5, 1:3], A.T[2:5, 1:3].astype(dtype))


def test_an_odd_header_length_and_an_empty_tensor_are_read(tmp_path):
    header = json.dumps({"a": entry([2], 0, 8), "b": entry([0, 4], 8, 8)}).encode()
    write_raw(tmp_path / "x.safetensors", header + b" " * (1 - len(header) % 2), A[0, :2].tobytes())
    tensors = {tensor.name: tensor for tensor in read_header(tmp_path / "x.safetensors")}
    assert tensors["a"][(slice(None),)].tolist() == [0, 1]
    assert tensors["b"][(slice(None),)].shape == (0, 4)


def test_several_files_are_read_with_an_index_and_without(tmp_path):
    tensors = random_tensors(llama_config())
    write_tensors(tmp_path, tensors, num_files=3)
    for _ in range(2):
        checkpoint = open_checkpoint(tmp_path)
        assert {name: checkpoint[name].shape for name in checkpoint} == {n: t.shape for n, t in tensors.items()}
        (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)


def test_a_second_copy_of_the_model_is_left_alone(tmp_path):
    save_file({"a": A}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"a": A, "tok_embeddings": A}, tmp_path / "consolidated.00.safetensors")
    assert set(open_checkpoint(tmp_path)) == {"a"}


def test_every_cut_of_a_file_is_noticed(tmp_path):
    """At each length, the file is named; once the header is whole, a tensor is too."""
    path = tmp_path / "model.safetensors"
    save_file({"a": A, "b": A}, path)
    content = path.read_bytes()
    data = len(content) - 2 * A.nbytes
    for length in range(len(content)):
        path.write_bytes(content[:length])
        message = refusal(tmp_path)
        assert str(path) in message
        if length >= data:
            assert "tensor a ends" in message if length < data + A.nbytes else "tensor b ends" in message


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry([2], 0, 8)}, 9, "has 1 bytes more than its header describes"),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "Tensor b"),
        ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20, "Tensor b"),
        ({"a": entry([2], 4, 12)}, 12, "Tensor a"),
        ({"a": entry([3], 0, 8)}, 8, "Tensor a in {path} has 8 bytes, but F32 [3] needs 12"),
        ({"a": entry([2], 8, 0)}, 8, "Tensor a"),
        ({"a": entry([2], -8, 0)}, 8, "Tensor a"),
        ({"a": entry([-2], 0, -8)}, 8, "tensor a in an unknown way"),
        ({"a": entry([2.0], 0, 8)}, 8, "tensor a in an unknown way"),
        ({"a": entry([2**62] * 8, 0, 8)}, 8, "Tensor a in {path} has 8 bytes"),
        ({"a": entry([10**4000, 10**4000], 0, 8)}, 8, "tensor a in an unknown way"),
        ({"a": entry([2**62] * 500, 0, 8)}, 8, "tensor a in an unknown way"),
        ({"a": entry([2], -(10**4299), 9 * 10**4299)}, 8, "tensor a in an unknown way"),
        ({"a": entry([2], 0, 8, "F33")}, 8, "type 'F33'"),
        ({"a": {"dtype": "F32"}}, 8, "tensor a in an unknown way"),
        ({"a": 3}, 0, "tensor a in an unknown way"),
        (b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": 1}', 0, "holds a twice"),
        (b"[]", 0, "not a JSON object"),
        (b'{"a": NaN}', 0, "not valid JSON"),
        (b'{"a":' * 100_000, 0, "nested too deeply"),
        (b"\xff\xff", 0, "not valid JSON"),
    ],
    ids=range(21),
)
def test_a_header_that_lies_is_refused(tmp_path, header, data, words):
    path = tmp_path / "model.safetensors"
    write_raw(path, header, b"\0" * data)
    message = refusal(tmp_path)
    assert str(path) in message
    assert words.format(path=path) in message


def test_a_header_is_no_longer_than_allowed(tmp_path):
    save_file({"a": A}, tmp_path / "x.safetensors")
    length = (tmp_path / "x.safetensors").stat().st_size - A.nbytes - 8
    assert len(read_header(tmp_path / "x.safetensors", length)) == 1
    with pytest.raises(CheckpointError, match=f"has a header of {length} bytes; at most {length - 1} are read"):
        read_header(tmp_path / "x.safetensors", length - 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cut short"),
        (b"1234567", "cut short"),
        (struct.pack("<Q", 2**60) + b"{}", "cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 4976698672\n", "git lfs pull"),
        (b"\n<!DOCTYPE html>\n<html>Not found</html>", "web page"),
        (b"root:x:0:0:root:/bin:/bin/sh\n" * 40, "is no safetensors file"),
    ],
    ids=range(6),
)
def test_a_file_of_another_kind_is_told(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    message = refusal(tmp_path)
    assert str(path) in message
    assert words in message
    assert "root:" not in message


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_that_names_a_missing_file_is_told(tmp_path):
    save_file({"a": A}, tmp_path / "model-1.safetensors")
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    assert f"{tmp_path / 'model-2.safetensors'} is missing" in refusal(tmp_path)


def test_an_index_that_names_the_wrong_file_is_told(tmp_path):
    save_file({"a": A}, tmp_path / "model-1.safetensors")
    save_file({"b": A}, tmp_path / "model-2.safetensors")
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors"})
    assert "says that model-1.safetensors holds b, but it does not" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "..", ".", "", 3, None])
def test_an_index_cannot_name_files_outside_the_folder(tmp_path, file):
    write_index(tmp_path, {"a": file})
    assert "which is not a safetensors file of this folder" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}', "{"])
def test_a_damaged_index_is_told(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(tmp_path)


def test_a_tensor_in_two_files_is_told_with_both(tmp_path):
    for name in ("model-1.safetensors", "model-2.safetensors"):
        save_file({"a": A}, tmp_path / name)
    message = refusal(tmp_path)
    assert all(word in message for word in ("Tensor a", "model-1.safetensors", "model-2.safetensors"))


def test_a_folder_without_weights_says_what_it_has_instead(tmp_path):
    assert "holds no *.safetensors file." in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    assert "it has pytorch_model.bin, a format that is not read" in refusal(tmp_path)
