"""Estimates beside what was measured on one H200 (docs/performance.md)."""

import pytest

from hex_llm.catalog.chips import CHIPS
from hex_llm.planning.model import read_model
from hex_llm.planning.throughput import Devices, Load, decode_seconds, estimate, prefill_seconds
from tests.planning.plans import planned

LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
# Bits, in, out, requests at once, output tokens a second. Servers first, then offline, where all requests come at once
# (of the 2048 that are 128 tokens long, 512 are answered at a time).
SERVED = [
    (LLAMA_8B, "none", "auto", 1000, 1000, 64, 6888),
    (LLAMA_8B, "none", "auto", 1000, 1000, 128, 8481),
    (LLAMA_70B, "fp8", "fp8", 1000, 1000, 64, 1902),
    (LLAMA_70B, "fp8", "fp8", 1000, 1000, 128, 2501),
    (LLAMA_70B, "w8a8", "fp8", 1000, 1000, 64, 1841),
    (LLAMA_70B, "w8a8", "fp8", 1000, 1000, 128, 2415),
    (LLAMA_70B, "awq", "fp8", 1000, 1000, 64, 1792),
    (LLAMA_70B, "awq", "fp8", 1000, 1000, 128, 2110),
    (LLAMA_70B, "w4a8", "fp8", 1000, 1000, 64, 2151),
    (LLAMA_70B, "w4a8", "fp8", 1000, 1000, 128, 2540),
    (LLAMA_70B, "int8", "fp8", 1000, 1000, 128, 1704),
    (LLAMA_8B, "none", "auto", 128, 128, 512, 17225),
    (LLAMA_8B, "none", "auto", 128, 2048, 56, 8149),
    (LLAMA_8B, "none", "auto", 500, 2000, 62, 7649),
    (LLAMA_8B, "none", "auto", 1000, 1000, 396, 9159),
    (LLAMA_8B, "none", "auto", 2048, 128, 157, 1969),
    (LLAMA_8B, "none", "auto", 2048, 2048, 125, 5878),
    (LLAMA_8B, "none", "auto", 5000, 500, 45, 1861),
]


@pytest.mark.parametrize(("name", "bits", "cache", "prompt", "output", "requests", "measured"), SERVED)
def test_throughput_is_within_a_fifth_of_what_was_measured(
    name, bits, cache, prompt, output, requests, measured, capsys
):
    report = planned(
        capsys, name, "--machine=h200x1", f"--quantization={bits}", f"--kv_cache_dtype={cache}",
        f"--input_len={prompt}", f"--output_len={output}", f"--concurrency={requests}",
    )  # fmt: skip
    (row,) = report["rows"]
    assert row["running_requests"] == requests
    assert row["efficiency_measured_here"]
    assert row["output_tokens_per_second"] == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("name", "bits", "cache", "sequences", "milliseconds"),
    [
        (LLAMA_8B, "none", "auto", 1, 4.14),
        (LLAMA_8B, "none", "auto", 64, 7.66),
        (LLAMA_8B, "none", "auto", 128, 11.54),
        (LLAMA_8B, "int4", "auto", 64, 5.985),
        (LLAMA_8B, "w4a8", "auto", 64, 5.747),
        (LLAMA_8B, "w4a8", "fp8", 64, 4.518),
        (LLAMA_8B, "fp8", "fp8", 64, 4.819),
        ("google/gemma-2-9b", "none", "auto", 64, 13.16),
        ("Qwen/Qwen2.5-7B", "none", "auto", 64, 5.64),
    ],
)
def test_a_decode_step_takes_as_long_as_it_did(name, bits, cache, sequences, milliseconds):
    assert 1e3 * decode_seconds(_h200(name, bits, cache), sequences, 1500) == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(512, 12.0), (1024, 22.4), (4096, 99.0), (8192, 213.6)])
def test_a_prompt_takes_as_long_as_it_did(tokens, milliseconds):
    assert 1e3 * prefill_seconds(_h200(LLAMA_8B, "none"), tokens) == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize(("bits", "seconds"), [("fp8", (4.5, 9.2)), ("int4", (6.4, 13.0)), ("w4a8", (5.0, 10.4))])
def test_first_tokens_of_requests_that_all_come_at_once(bits, seconds):
    devices = _h200(LLAMA_70B, bits, "fp8")
    found = [estimate(devices, Load(1000, 1000, running)).first_token_together for running in (64, 128)]
    assert found == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(("bits", "chip"), [("w8a8", "h200"), ("fp8", "h200"), ("w8a8", "v4"), ("fp8", "tpu7x")])
def test_what_takes_its_tokens_as_they_are_is_no_faster_in_8_bits(bits, chip):
    """Experts, and whatever it is on a chip that does not multiply such numbers."""
    name = "mistralai/Mixtral-8x7B-v0.1" if chip == "h200" else LLAMA_8B
    plain, eight = (read_model(name, each, "auto") for each in ("int8", bits))
    seconds = [prefill_seconds(Devices(each.shape, each.precision, CHIPS[chip], 1), 4096) for each in (plain, eight)]
    assert 0.95 * seconds[0] < seconds[1] <= seconds[0]


def test_it_gets_slower_with_what_there_is_to_do_and_faster_with_devices():
    model = read_model(LLAMA_70B, None, "auto")
    four, eight = (Devices(model.shape, model.precision, CHIPS["v6e"], count) for count in (4, 8))
    assert decode_seconds(eight, 64, 1500) < decode_seconds(four, 64, 1500)
    assert decode_seconds(eight, 64, 1500) < decode_seconds(eight, 65, 1500) < decode_seconds(eight, 65, 1600)
    assert prefill_seconds(eight, 100) <= prefill_seconds(eight, 1000) < prefill_seconds(eight, 1001)
    # vLLM's 25.4 ms per token on eight chips are no figure of ours, but of the same size.
    assert 1e3 * estimate(eight, Load(1000, 1000, 64)).seconds_per_token == pytest.approx(25.4, rel=0.25)


def _h200(name: str, bits: str, cache="auto") -> Devices:
    model = read_model(name, bits, cache)
    return Devices(model.shape, model.precision, CHIPS["h200"], 1)
