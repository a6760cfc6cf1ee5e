"""Products with weights in few bits at models' sizes, as the TPU compiler takes them.

Some are compiled always; `pytest -m slow tests/tpu/test_quant_matmul.py` compiles the others.
"""

import math
import re

import pytest

INT4 = {"coding": "int4", "group": 128, "zero": True}
INT8, FP8, W8A8 = {"coding": "int8"}, {"coding": "fp8"}, {"coding": "w8a8"}
W4A8 = INT4 | {"coding": "w4a8"}
NF4, FP4, MXFP4 = {"coding": "nf4", "group": 64}, {"coding": "fp4", "group": 64}, {"coding": "mxfp4", "group": 32}
BITS = {"int4": 4, "w4a8": 4, "int8": 8, "fp8": 8, "w8a8": 8, "nf4": 4, "fp4": 4, "mxfp4": 4}
SHAPES = {
    "Llama-3.1-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Llama-3.3-70B on 8": ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}
ALWAYS = (
    ("v5e", 64, (28672, 4096), INT4),
    ("v5e", 512, (3584, 18944), INT8),
    ("v5e", 256, (4096, 4096), FP4),
    ("v6e", 256, (4096, 14336), INT4),
    ("v6e", 2048, (8192, 3584), INT8),
    ("v6e", 64, (7168, 8192), FP8),
    ("v6e", 16, (1280, 8192), NF4),
    ("v5e", 64, (28672, 4096), W8A8),
    ("v6e", 2048, (4096, 14336), W8A8),
    ("v6e", 64, (28672, 4096), W4A8),
    ("v6e", 8, (8192, 1024), MXFP4),
)
OTHERS = [
    pytest.param(chip, tokens, shape, kind, marks=pytest.mark.slow)
    for chip in ("v5e", "v6e")
    for shapes in SHAPES.values()
    for shape in shapes
    for tokens in (8, 256, 7680)  # the last is no size of theirs: a result is told from a weight
    for kind in (INT4, INT8, FP8, W8A8, NF4, MXFP4)
]


def check(compiled, kind, tokens, out, size):
    """One kernel, which takes the weight as it lies, in little more than its bits."""
    assert [name.split(".")[0] for name in compiled.kernels] == ["quant_matmul"]
    # With fp8, w8a8 and w4a8, tokens are rounded, each with a scale of its own.
    assert compiled.temp_bytes <= (2 * tokens * (size + 2 * 128) if kind in (FP8, W8A8, W4A8) else 0) + 2**20
    # Neither the weight nor a copy of it is anywhere in 16 bits or more; the words that it lies in have two more
    # dimensions.
    made = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"(?:bf16|f32)\[([\d,]+)\]", compiled.text)]
    assert out * size not in made
    assert not re.search(r"= s32\[[\d,]+,8,128\][^ ]* (?:copy|transpose|fusion)\(", compiled.text)
    group = kind.get("group")
    per_group = (16 if kind["coding"] == "mxfp4" else 32) + (16 if kind.get("zero") else 0)
    return out * size // 8 * (BITS[kind["coding"]] + (per_group / group if group else 0))


@pytest.mark.parametrize(("chip", "tokens", "shape", "kind"), [*ALWAYS, *OTHERS])
def test_a_weight_is_read_as_it_lies(compiler, chip, tokens, shape, kind):
    out, size = shape
    compiled = compiler.compile("tests.tpu.kernels.quantized", chip, tokens=tokens, out=out, size=size, **kind)
    bytes_of_weight = check(compiled, kind, tokens, out, size)
    # Groups are filled up to a tile of 8 or 16.
    assert compiled.argument_bytes - 2 * tokens * size == pytest.approx(bytes_of_weight, rel=0.03)


@pytest.mark.parametrize(("chip", "in_int8"), [("v4", False), ("v5e", True), ("v5p", True), ("tpu7x", False)])
def test_whole_numbers_are_multiplied_where_a_chip_is_faster_at_it(compiler, chip, in_int8):
    tokens, out, size = 256, 4096, 4096
    compiled = compiler.compile("tests.tpu.kernels.quantized", chip, tokens=tokens, out=out, size=size, **W8A8)
    check(compiled, W8A8, tokens, out, size)
    assert (f"s8[{tokens},{size}]" in compiled.text) == in_int8


@pytest.mark.parametrize(
    ("chip", "shape", "kind"),
    [
        ("v5e", (3584, 4096), INT4),  # Mixtral-8x7B on 8
        ("v5e", (4096, 1792), INT4),
        pytest.param("v6e", (28672, 4096), INT4, marks=pytest.mark.slow),  # on one
        pytest.param("v6e", (4096, 14336), INT8, marks=pytest.mark.slow),
    ],
)
def test_experts_weights_are_read_as_they_lie(compiler, chip, shape, kind):
    (out, size), tokens = shape, 8 * 64
    compiled = compiler.compile(
        "tests.tpu.kernels.quantized", chip, tokens=tokens, out=out, size=size, num_experts=8, **kind
    )
    bytes_of_weight = 8 * check(compiled, kind, tokens, out, size)
    assert compiled.argument_bytes - 2 * tokens * size == pytest.approx(bytes_of_weight, rel=0.03)
