"""Every format against decoders that were written apart: bit by bit, whole, and in parts as devices ask for them."""

import json
from functools import partial

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from hex_llm.errors import CheckpointError
from hex_llm.kernels.quant_matmul import reference
from hex_llm.loader.checkpoint import open_checkpoint
from hex_llm.model_fields import Fields
from hex_llm.quantization.method import Format
from hex_llm.quantization.mxfp4 import Mxfp4
from hex_llm.quantization.read import read_method
from tests.quantization import decoders
from tests.quantization.writers import KINDS, Kind

OUT, IN = 48, 256
MODULE = "model.layers.0.self_attn.q_proj"
EVERY = slice(None)
PARTS = [
    (EVERY, EVERY),
    (slice(0, 24), EVERY),
    (EVERY, slice(64, 128)),
    (slice(3, 5), slice(17, 203)),
    (slice(47, 48), slice(255, 256)),
]


def method_of(kind: Kind):
    return read_method(Fields("config.json", kind.config, "quantization_config."))


def format_of(kind: Kind) -> Format:
    found = method_of(kind).format(MODULE)
    assert found is not None
    return found


def random_weight(seed=0, shape=(OUT, IN)):
    rng = np.random.default_rng(seed)
    return (rng.normal(0, 0.1, shape) * rng.uniform(0.5, 2, (shape[0], 1))).astype(np.float32)


def checkpoint(folder, modules):
    tensors = {
        f"{module}.{last}": np.ascontiguousarray(v) for module, each in modules.items() for last, v in each.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


@partial(jax.jit, static_argnames="format")
def decoded(arrays, *, format: Format):
    codes = format.decode(arrays)
    return codes, reference.dequantize(codes)


def check_share(format: Format, tensors, module, expert, rows, columns, expected):
    """`expected` is the whole matrix, its columns in the format's order."""
    share = format.read(tensors, module, expert, rows, columns)
    codes, values = decoded(share.arrays, format=format)
    assert (codes.coding, codes.zero is not None, codes.order) == (format.coding, format.has_zero, None)
    assert codes.input_scale is None  # that of all parts of a weight is found when they are one
    groups = codes.scale.shape[1]
    assert groups == (1 if format.group is None else codes.shape[1] // format.group)
    np.testing.assert_array_equal(np.asarray(values)[share.rows, share.columns], expected[rows, columns])


@pytest.mark.parametrize("name", KINDS)
def test_what_is_read_is_what_the_decoder_says(name, tmp_path):
    kind = KINDS[name]
    format, weight = format_of(kind), random_weight()
    stored = kind.pack(weight, MODULE)
    tensors = checkpoint(tmp_path, {MODULE: stored})
    expected = kind.decode(stored)
    assert np.abs(expected - weight).max() < 0.2 * np.abs(weight).max()  # the tests' own packers do pack
    order = format.order(tensors, MODULE)
    assert (order is not None) == format.has_order == ("sorted" in name)
    if order is not None:
        assert order.dtype == np.int32
        expected = expected[:, order]
    for rows, columns in PARTS:
        check_share(format, tensors, MODULE, None, rows, columns, expected)


@pytest.mark.parametrize("name", KINDS)
def test_the_tensors_asked_for_are_those_that_are_there(name, tmp_path):
    kind = KINDS[name]
    tensors = checkpoint(tmp_path, {MODULE: kind.pack(random_weight(), MODULE)})
    wanted = format_of(kind).tensors(MODULE, OUT, IN, None)
    method = method_of(kind)
    assert wanted.keys() <= tensors.keys()
    assert all(method.spare(tensors[name]) for name in tensors.keys() - wanted.keys())
    for name, stored in wanted.items():
        assert stored.admits(tensors[name].shape)
        assert tensors[name].dtype in stored.dtypes
        assert stored.shape is None or not stored.admits((*tensors[name].shape, 3))


@pytest.mark.parametrize("name", ["awq", "gptq 8 v2 sorted", "bitsandbytes nf4 nested", "float-quantized static"])
def test_shares_of_experts_are_decoded_together(name, tmp_path):
    kind = KINDS[name]
    format = format_of(kind)
    stored = {f"e.{i}.w1": kind.pack(random_weight(i), f"e.{i}.w1") for i in range(2)}
    tensors = checkpoint(tmp_path, stored)
    shares = [format.read(tensors, module, None, slice(8, 40), slice(64, 192)) for module in stored]
    arrays = {key: np.stack([share.arrays[key] for share in shares]) for key in shares[0].arrays}
    codes = jax.vmap(format.decode)(arrays)
    found = np.asarray(reference.dequantize(codes))[:, shares[0].rows, shares[0].columns]
    for module, each in zip(stored, found, strict=True):
        order = format.order(tensors, module)
        whole = kind.decode(stored[module])
        np.testing.assert_array_equal(each, (whole if order is None else whole[:, order])[8:40, 64:192])


def test_mxfp4_is_read_by_expert_and_by_every_other_row(tmp_path):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 10, 4, 16), dtype=np.uint8)
    scales = rng.integers(100, 150, (3, 10, 4), dtype=np.uint8)
    save_file({"m_blocks": blocks, "m_scales": scales}, tmp_path / "model.safetensors")
    tensors, format = open_checkpoint(tmp_path), Mxfp4()
    wanted = format.tensors("m", 10, 128, 3)
    assert {name: each.shape for name, each in wanted.items()} == {"m_blocks": blocks.shape, "m_scales": scales.shape}
    expected = decoders.mxfp4(blocks, scales)
    for expert in range(3):
        for rows in (EVERY, slice(0, 10, 2), slice(1, 10, 2), slice(3, 8, 2), slice(4, 7)):
            for columns in (EVERY, slice(32, 96), slice(5, 70)):
                check_share(format, tensors, "m", expert, rows, columns, expected[expert])


def test_the_least_and_the_largest_scales_of_mxfp4_are_powers_of_two():
    codes = Mxfp4().decode({"blocks": np.zeros((1, 2, 16), np.uint8), "scales": np.uint8([[0, 254]])})
    assert np.asarray(codes.scale).tolist() == [[2.0**-127, 2.0**127]]


def test_an_exponent_of_mxfp4_that_is_no_number_is_named(tmp_path):
    scales = np.full((2, 4, 2), 254, np.uint8)
    scales[1, 3, 1] = 255
    save_file({"m_blocks": np.zeros((2, 4, 2, 16), np.uint8), "m_scales": scales}, tmp_path / "model.safetensors")
    tensors = open_checkpoint(tmp_path)
    Mxfp4().read(tensors, "m", 0, EVERY, EVERY)
    with pytest.raises(CheckpointError, match=r"m_scales in .*model\.safetensors holds NaN, .* 255"):
        Mxfp4().read(tensors, "m", 1, EVERY, EVERY)


@pytest.mark.parametrize(
    ("name", "out", "size", "words"),
    [
        ("awq", 48, 192, ["192 columns", "groups of 128"]),
        ("awq", 44, 256, ["44 rows", "words of 8"]),
        ("gptq 4", 48, 192, ["192 columns", "groups of 128"]),
        ("gptq 8 of rows", 48, 254, ["254 columns", "words of 4"]),
        ("bitsandbytes nf4", 48, 96, ["96 columns", "groups of 64"]),
        ("pack-quantized 4", 48, 192, ["192 columns", "groups of 128"]),
        ("pack-quantized 4 zeros", 44, 256, ["44 rows", "words of 8"]),
    ],
)
def test_sizes_that_do_not_go_with_a_format_are_named(name, out, size, words):
    with pytest.raises(CheckpointError) as error:
        format_of(KINDS[name]).tensors(MODULE, out, size, None)
    for word in (MODULE, *words):
        assert word in str(error.value)


@pytest.mark.parametrize(
    "name", ["awq", "gptq 4", "bitsandbytes nf4", "bitsandbytes int8", "fp8 static", "int-quantized"]
)
def test_experts_in_one_tensor_are_refused_where_none_are_kept_so(name):
    with pytest.raises(CheckpointError, match="8 experts in one tensor"):
        format_of(KINDS[name]).tensors(MODULE, OUT, IN, 8)


def test_mxfp4_of_a_single_matrix_is_refused():
    with pytest.raises(CheckpointError, match="no experts in one tensor"):
        Mxfp4().tensors(MODULE, OUT, IN, None)


def altered(folder, name, last, change):
    kind = KINDS[name]
    stored = kind.pack(random_weight(), MODULE)
    stored[last] = change(stored[last])
    return format_of(kind), checkpoint(folder, {MODULE: stored})


def text(change):
    def changed(state):
        return np.frombuffer(change(bytes(state)), np.uint8)

    return changed


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("name", "last", "change", "words"),
    [
        ("gptq 8", "qzeros", lambda zeros: zeros + 1, ["qzeros", "127", "sym"]),
        ("gptq 4 sorted", "g_idx", lambda groups: groups * 0, ["g_idx", "32 columns"]),
        ("gptq 4", "g_idx", lambda groups: groups[::-1], ["g_idx", "order"]),
        ("bitsandbytes nf4", STATE, text(lambda state: state.replace(b"64", b"128", 1)), ["nf4", "blocksize of 64"]),
        ("bitsandbytes nf4", STATE, text(lambda state: state.replace(b"[48", b"[40")), ["nf4", "[40, 256]"]),
        ("bitsandbytes nf4", STATE, text(lambda state: state[:-3]), ["quant_state"]),
        ("bitsandbytes nf4", STATE, text(lambda state: b"[]"), ["quant_state"]),
        ("bitsandbytes nf4 nested", STATE, text(lambda state: state.replace(b"_offset", b"_set")), ["nested_offset"]),
        ("bitsandbytes nf4", "weight.quant_map", lambda table: table[::-1], ["quant_map", "nf4"]),
        ("pack-quantized 4", "weight_shape", lambda shape: shape[::-1], ["weight_shape", "[256, 48]", "[48, 256]"]),
    ],
)
def test_values_that_contradict_the_config_are_named(name, last, change, words, tmp_path):
    format, tensors = altered(tmp_path, name, last, change)
    with pytest.raises(CheckpointError) as error:
        format.read(tensors, MODULE, None, EVERY, EVERY)
    for word in ("model.safetensors", *words):
        assert word in str(error.value)


@pytest.mark.parametrize("shape", [(2 * OUT, IN // 2), (OUT // 2, 2 * IN)])
def test_a_shape_of_as_many_numbers_is_not_taken_for_the_matrix_that_is_wanted(shape, tmp_path):
    said = json.dumps(list(shape)).encode()
    format, tensors = altered(
        tmp_path, "bitsandbytes nf4", STATE, text(lambda state: state.replace(b"[48, 256]", said))
    )
    with pytest.raises(CheckpointError, match=rf"quant_state.*a matrix of {shape[0]} x {shape[1]}"):
        format.read(tensors, MODULE, None, slice(0, OUT), slice(0, IN))
