"""Every example of Hex-LLM's guides, and of the one for vLLM on TPUs: a plan comes to the same machine and flags."""

import pytest

from hex_llm.config import Config
from tests.planning.plans import planned

LLAMA_8B = "meta-llama/Llama-3.1-8B"
AWQ = "hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4"

# What is asked; machine, machines, topology; flags.
EXAMPLES = {
    "8B, the workflow's own": (
        [f"{LLAMA_8B}-Instruct", "--accelerator=v5e", "--max_model_len=4096", "--hbm_utilization_factor=0.95"],
        ("ct5lp-hightpu-4t", 1, "2x2"),
        {"tensor_parallel_size": 4, "max_model_len": 4096, "hbm_utilization_factor": 0.95},
    ),
    "70B in AWQ": (
        [AWQ, "--accelerator=v5e", "--max_model_len=4096", "--hbm_utilization_factor=0.45"],
        ("ct5lp-hightpu-4t", 1, "2x2"),
        {"tensor_parallel_size": 4, "max_model_len": 4096, "hbm_utilization_factor": 0.45},
    ),
    "70B on several hosts": (
        ["meta-llama/Meta-Llama-3.1-70B", "--accelerator=v5e", "--hbm_utilization_factor=0.9"],
        ("ct5lp-hightpu-4t", 4, "4x4"),
        {"tensor_parallel_size": 16, "num_hosts": 4, "hbm_utilization_factor": 0.9},
    ),
    "Gemma 2": (
        ["google/gemma-2-9b-it", "--accelerator=v5e", "--hbm_utilization_factor=0.8", "--concurrency=512"],
        ("ct5lp-hightpu-4t", 1, "2x2"),
        {"tensor_parallel_size": 4, "hbm_utilization_factor": 0.8, "max_decode_seqs": 512},
    ),
    "8B, engines for prompts and for answers": (
        [LLAMA_8B, "--accelerator=v5e", "--disagg_topo=3,1", "--hbm_utilization_factor=0.9"],
        ("ct5lp-hightpu-8t", 1, "2x4"),
        {"tensor_parallel_size": 2, "disagg_topo": "3,1", "hbm_utilization_factor": 0.9},
    ),
    # The guides leave half of the machine without work there, where a plan has a second copy.
    "8B on v5e-8 (prefix caching, chunked prefill)": (
        [LLAMA_8B, "--machine=ct5lp-hightpu-8t", "--hbm_utilization_factor=0.9"],
        ("ct5lp-hightpu-8t", 1, "2x4"),
        {"tensor_parallel_size": 4, "hbm_utilization_factor": 0.9, "enable_chunked_prefill": True},
    ),
    "8B on v5e-8 (prefix caching, in the earlier guide)": (
        [LLAMA_8B, "--machine=ct5lp-hightpu-8t", "--tensor_parallel_size=2", "--hbm_utilization_factor=0.9"],
        ("ct5lp-hightpu-8t", 1, "2x4"),
        {"tensor_parallel_size": 2, "hbm_utilization_factor": 0.9},
    ),
    "vLLM's 70B, decode heavy": (
        ["meta-llama/Llama-3.3-70B-Instruct", "--accelerator=v6e", "--max_model_len=2048", "--concurrency=128"],
        ("ct6e-standard-8t", 1, "2x4"),
        {"tensor_parallel_size": 8, "max_model_len": 2048},
    ),
    "vLLM's 70B, prefill heavy": (
        ["meta-llama/Llama-3.1-70B-Instruct", "--accelerator=v6e", "--max_model_len=2048", "--input_len=1800",
         "--output_len=128"],
        ("ct6e-standard-8t", 1, "2x4"),
        {"tensor_parallel_size": 8, "max_model_len": 2048},
    ),
    "vLLM's 8B": (
        [f"{LLAMA_8B}-Instruct", "--accelerator=v6e", "--max_model_len=2048", "--input_len=1800", "--output_len=128",
         "--concurrency=128"],
        ("ct6e-standard-1t", 1, "1x1"),
        {"tensor_parallel_size": 1, "max_model_len": 2048},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "machine", "flags"), EXAMPLES.values(), ids=EXAMPLES)
def test_a_plan_says_what_the_guides_do(argv, machine, flags, capsys):
    (row,) = planned(capsys, *argv)["rows"]
    assert (row["machine"], row["hosts"], row["topology"]) == machine
    assert row["flags"].items() >= flags.items()
    assert row["tensor_parallel_size"] * row["copies"] == row["devices"], "no chip is left without work"
    Config(**row["flags"])  # the server takes them


def test_the_workflow_has_the_numbers_of_the_guide(capsys):
    report = planned(capsys, f"{LLAMA_8B}-Instruct", "--accelerator=v5e")
    assert report["memory_lower_bound_bytes"] == pytest.approx(8 * 16 / 8 * 1e9, rel=0.01)
    assert report["rows"][0]["chips_lower_bound"] > 1
    assert [step[:2] for step in report["steps"]] == ["1.", "2.", "3.", "4.", "5."]


@pytest.mark.parametrize(
    ("quantization", "machine", "hosts"),
    [
        ("awq", "ct5lp-hightpu-4t", 1),
        ("int4", "ct5lp-hightpu-4t", 1),
        ("int8", "ct5lp-hightpu-8t", 1),
        ("none", "ct5lp-hightpu-4t", 4),
    ],
)
def test_70b_is_served_in_full_precision_and_in_few_bits(quantization, machine, hosts, capsys):
    argv = ("meta-llama/Llama-3.1-70B-Instruct", "--accelerator=v5e", f"--quantization={quantization}")
    (row,) = planned(capsys, *argv)["rows"]
    assert (row["machine"], row["hosts"]) == (machine, hosts)
    # AWQ is a checkpoint of its own, for which the server has no flag.
    assert row["flags"].get("quantization") == (quantization if quantization.startswith("int") else None)
