"""A replica of two hosts with adapters: all hosts have each where the steps that use it expect it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hex_llm.source import EMBEDDED_MODEL
from hex_llm.text.chat import encode_chat
from hex_llm.text.tokenizer import Tokenizer
from tests.multihost.cluster import hosts_serving
from tests.server.servers import FLAGS

FOLDER = Path(__file__).parents[2] / "examples" / "adapters"
ALONE = Path(__file__).parent / "alone.py"
QUESTIONS = ("What is the capital of France?", "What colour is the sky?")
SAID = ("The capital of France is Paris.", "THE CAPITAL OF France IS Paris!", "The capital of France be Paris. Arr!")


def louder(folder: Path) -> Path:
    """Another adapter: the shouting one, three times as much of it."""
    shutil.copytree(FOLDER / "shouting", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["lora_alpha"] *= 3
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_two_hosts_answer_with_more_adapters_than_places_as_one_process(tmp_path):
    sources = {"shouting": FOLDER / "shouting", "pirate": FOLDER / "pirate", "louder": louder(tmp_path / "louder")}
    modules = ",".join(f"{name}={source}" for name, source in sources.items())
    flags = ["--tensor_parallel_size=4", "--dtype=float32", "--no-warmup", "--enable_lora", f"--lora_modules={modules}"]
    flags += ["--max_lora_rank=8", "--max_num_mem_cached_lora=2"]
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    bodies = [
        {"prompt": encode_chat(tokenizer, [{"role": "user", "content": question}]), "dynamic-lora": name}
        | {"temperature": 0, "max_tokens": 40}
        for question in QUESTIONS
        for name in ("", *sources)
    ]
    (tmp_path / "bodies").write_text(json.dumps(bodies))
    with (
        (tmp_path / "bodies").open() as asked,
        subprocess.Popen(
            [sys.executable, str(ALONE), f"--model={EMBEDDED_MODEL}", *FLAGS, *flags],
            stdin=asked, stdout=subprocess.PIPE, env=os.environ | {"JAX_NUM_CPU_DEVICES": "4"},
        ) as alone,
        hosts_serving(2, EMBEDDED_MODEL, tmp_path, *flags) as hosts,
    ):  # fmt: skip
        found = [hosts.ask(bodies).texts() for _ in range(2)]
        expected = json.loads(alone.communicate(timeout=120)[0])
        assert tuple(expected[:3]) == SAID
        assert len({*expected}) == len(bodies), "adapters that change nothing test nothing"
        assert found == [expected] * 2
        assert hosts.metric("lora_slot_evictions_total") >= 2
