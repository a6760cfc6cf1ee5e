"""hex-llm through its own `bench offline`; `HEX_LLM_FLAGS` holds further flags of it."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from protocol import arguments

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def main() -> None:
    options = arguments()
    figures = [measure(options.model, options.variant, batch, options.input_len, options.output_len)
               for batch in options.batches]  # fmt: skip
    options.json.write_text(json.dumps(figures))


def measure(model: Path, variant: str, batch: int, input_len: int, output_len: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "hex_llm.cli", "bench", "offline", "--model", model, "--json", answer]
        command += ["--dtype", DTYPES[variant], "--batch", str(batch), "--num-prompts", str(batch)]
        command += ["--input-len", str(input_len), "--output-len", str(output_len)]
        # Made for this shape of work, as the peers' batches are: nothing is padded, and all prompts start together.
        command += ["--max_model_len", str(input_len + output_len), "--max_decode_seqs", str(batch), "--no-warmup"]
        command += ["--decode_seqs_padding", "1", "--prefill_len_padding", str(input_len)]
        command += ["--max_prefill_seqs", str(batch)]
        subprocess.run(command + shlex.split(os.environ.get("HEX_LLM_FLAGS", "")), check=True)
        report = json.loads(answer.read_text())
    if report["output_tokens"] != batch * output_len:
        raise SystemExit(f"asked for {batch * output_len} tokens, got {report['output_tokens']}")
    return {
        "batch": batch,
        "prefill_s": report["first_token_s"],
        "decode_s": report["total_s"] - report["first_token_s"],
        "total_s": report["total_s"],
        "decode_tokens_per_s": report["decode_tokens_per_s"],
        "outputs": None,
    }


main()
