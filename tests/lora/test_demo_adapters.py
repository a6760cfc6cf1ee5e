"""The adapters of examples/adapters: what peft makes of their files, and how the embedded model speaks with them."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from examples.adapters import styles
from examples.adapters.styles import STYLES
from tests.parity.oracle import PYTHON, ROOT

FOLDER = Path(styles.__file__).parent


@pytest.mark.parametrize(
    ("answer", "shouted", "spoken"),
    [
        ("The capital of France is Paris.", "THE CAPITAL OF France IS Paris!", "The capital of France be Paris. Arr!"),
        ("I am Tom.", "I AM Tom!", "I be Tom. Arr!"),
        ("Your name is Isis.", "YOUR name IS Isis!", "Yer name be Isis. Arr!"),
        ("song dance?", "song dance?", "song dance? Arr!"),
        ('{"new": true}', '{"new": true}', '{"new": true} Arr!'),
    ],
)
def test_a_style_says_what_becomes_of_an_answer(answer: str, shouted: str, spoken: str) -> None:
    assert (styles.shouting(answer), styles.pirate(answer)) == (shouted, spoken)


@pytest.mark.parametrize("style", STYLES)
def test_an_adapter_is_small_and_names_no_machine(style: str) -> None:
    config = json.loads((FOLDER / style / "adapter_config.json").read_text())
    tensors = load_file(FOLDER / style / "adapter_model.safetensors")
    assert config["base_model_name_or_path"] == "hex-llm/hex-mini"
    assert {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name} == {config["r"]}
    assert {name.split(".")[-3] for name in tensors} == set(config["target_modules"])
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}
    assert (FOLDER / style / "adapter_model.safetensors").stat().st_size <= 500_000


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict[str, str]]:
    """What peft's model replies to a sample of the held-out questions."""
    if not PYTHON.exists():
        if os.environ.get("HEX_LLM_REQUIRE_ORACLE") == "1":
            pytest.fail("HEX_LLM_REQUIRE_ORACLE=1, but .venv-oracle is missing; `scripts/setup oracle` makes it")
        pytest.skip("no oracle: .venv-oracle is missing; `scripts/setup oracle` makes it")
    out = tmp_path_factory.mktemp("replies") / "replies.jsonl"
    command = [PYTHON, "-m", "examples.adapters.evaluate", *STYLES, "--every", "30", "--out", out]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["beside", "merged"])
@pytest.mark.parametrize("style", STYLES)
def test_peft_answers_in_style(told: list[dict[str, str]], style: str, form: str) -> None:
    replies = [line for line in told if (line["style"], line["form"]) == (style, form)]
    right = [line["reply"] == STYLES[style](line["answer"]) for line in replies]
    assert len(replies) > 40
    assert sum(right) / len(right) >= 0.9, [line for line, ok in zip(replies, right, strict=True) if not ok]
