"""The instructions by which Hopper decodes, one by one, for every code: as numbers, without a GPU."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.paged_attention import gpu_decode_narrow
from hex_llm.kernels.quant_matmul import gpu_decode
from hex_llm.kernels.quant_matmul.gpu_layout import SMALLER, WHOLE, _shifts
from hex_llm.kernels.quant_matmul.weight import TABLES, Coding, bits

WORDS = 1 << 32


def halves(value: int) -> np.ndarray:
    return np.array([value & 0xFFFF, value >> 16], np.uint16).view(jnp.bfloat16).astype(np.float32)


def joined(values: np.ndarray) -> int:
    low, high = values.astype(jnp.bfloat16).view(np.uint16).tolist()
    return low | high << 16


def permuted(low: int, high: int, selector: int) -> int:
    """Four bytes of eight. No selector asks for a sign here."""
    pool = (low | high << 32).to_bytes(8, "little")
    places = [selector >> 4 * i & 15 for i in range(4)]
    assert max(places) < 8
    return int.from_bytes(bytes(pool[place] for place in places), "little")


def bitwise(a: int, b: int, c: int, table: int) -> int:
    chosen = (table >> i & 1 for i in range(8))
    terms = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i, on in enumerate(chosen) if on]
    return sum(term % WORDS for term in terms) % WORDS


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, count: a >> count,
    "prmt.b32": permuted,
    "lop3.b32": bitwise,
    "sub.bf16x2": lambda a, b: joined(halves(a) - halves(b)),
    "fma.rn.bf16x2": lambda a, b, c: joined(halves(a).astype(np.float64) * halves(b) + halves(c)),
    "mul.bf16x2": lambda a, b: joined(halves(a) * halves(b)),
}


def run(text: str, *operands: int) -> int:
    registers = {f"${i + 1}": operand for i, operand in enumerate(operands)}
    for line in filter(None, (part.strip() for part in text.split(";"))):
        name, rest = line.split(maxsplit=1)
        target, *sources = re.split(r",\s*", rest)
        registers[target] = INSTRUCTIONS[name](
            *(registers[each] if each in registers else int(each, 0) for each in sources)
        )
    return registers["$0"]


def numbers(coding: Coding, codes: np.ndarray, zero: int | None = None) -> np.ndarray:
    """What the codes of a word, in the order of the layout, are decoded to, before a group's scale."""
    shifts = np.asarray(_shifts(coding)).reshape(-1)
    word = sum(int(code) << int(shift) for code, shift in zip(codes, shifts, strict=True))
    pairs = gpu_decode._numbers(word, coding)
    if coding in WHOLE:
        factors = gpu_decode.FACTORS[coding]
        pairs = [gpu_decode._less(pair, factors[i % len(factors)], zero, coding) for i, pair in enumerate(pairs)]
    return np.concatenate([halves(pair) for pair in pairs])


def test_every_number_of_int8_pages_is_the_same_in_bfloat16(monkeypatch):
    monkeypatch.setattr(gpu_decode_narrow, "_asm", run)
    for word in np.arange(256, dtype=np.uint8).reshape(-1, 4):
        pairs = [gpu_decode_narrow._whole_numbers(int(word.view(np.uint32)[0]), pair) for pair in range(2)]
        np.testing.assert_array_equal(np.concatenate([halves(pair) for pair in pairs]), word.view(np.int8))


@pytest.mark.parametrize("coding", ["int8", "int4", "nf4", "fp4", "mxfp4", "fp8"])
def test_every_code_becomes_its_number(monkeypatch, coding):
    monkeypatch.setattr(gpu_decode, "_asm", run)
    count = 1 << bits(coding)
    every = np.arange(count)
    if coding in TABLES:
        want = TABLES[coding].astype(jnp.bfloat16).astype(np.float32)
    elif coding in WHOLE:
        want = (every - (128 if coding == "int8" else 0)) / SMALLER
    else:
        every = every[every % 128 != 127]  # what is no number
        want = every.astype(np.uint8).view(jnp.float8_e4m3fn).astype(np.float32) / halves(gpu_decode.LARGE)[0]
    size = 32 // bits(coding)
    for shift in range(size):  # each code in each place of a word
        codes, expected = np.roll(every, shift), np.roll(want, shift)
        for first in range(0, len(codes) - size + 1, size):
            part = slice(first, first + size)
            np.testing.assert_array_equal(numbers(coding, codes[part]), expected[part])


@pytest.mark.parametrize(("coding", "zeros"), [("int4", range(17)), ("int8", range(0, 257, 8))])
def test_a_zero_is_subtracted_exactly(monkeypatch, coding, zeros):
    monkeypatch.setattr(gpu_decode, "_asm", run)
    codes = np.arange(1 << bits(coding)).reshape(-1, 32 // bits(coding))
    for zero in zeros:
        stored = joined(np.full(2, -zero / SMALLER))
        for some in codes:
            np.testing.assert_array_equal(numbers(coding, some, stored), (some - zero) / SMALLER)
