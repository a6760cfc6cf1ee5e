"""One setting tried: a server with these flags, and `hex-llm bench serve` against it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hex_llm.bench.local_server import LocalServer
from hex_llm.bench.tune.axes import Setting
from hex_llm.bench.tune.search import Trial
from hex_llm.errors import StartError


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent to the server, and which percentile of the times counts."""

    input_len: int
    output_len: int
    concurrency: int
    num_prompts: int
    percentile: int

    @property
    def flags(self) -> list[str]:
        return [
            "--dataset_name=random", f"--random_input_len={self.input_len}", f"--random_output_len={self.output_len}",
            f"--max_concurrency={self.concurrency}", f"--num_prompts={self.num_prompts}", "--ignore_eos",
            "--percentile_metrics=ttft,tpot", f"--metric_percentiles={self.percentile}",
        ]  # fmt: skip


def run_trial(setting: Setting, server_flags: Sequence[str], load: Load, folder: Path, timeout_s: float) -> Trial:
    """A server that cannot start with a setting is a finding, too."""
    try:
        with LocalServer.running([*server_flags, *setting.flags], folder / "server.log", timeout_s=timeout_s) as server:
            found = _bench(server, load, folder / "result.json", timeout_s)
    except StartError as error:
        return Trial(setting, failed=str(error))
    return Trial(
        setting,
        tokens_per_s=found["output_throughput"],
        ttft_ms=found[f"p{load.percentile}_ttft_ms"],
        tpot_ms=found[f"p{load.percentile}_tpot_ms"],
    )


def _bench(server: LocalServer, load: Load, result: Path, timeout_s: float) -> dict[str, Any]:
    result.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "hex_llm.cli", "bench", "serve", f"--base_url={server.url}", *load.flags,
        "--save_result", f"--result_dir={result.parent}", f"--result_filename={result.name}", "--disable_tqdm",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise StartError(f"The load was not done after {timeout_s:.0f} s.") from None
    if done.returncode:
        raise StartError(f"The load failed: {(done.stderr.strip() or done.stdout.strip())[-600:]}")
    return json.loads(result.read_text())
