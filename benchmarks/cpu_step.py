"""Where a decode step's time goes on the CPU: whole, and without its attention.

    python benchmarks/cpu_step.py .cache/bench/llama-100m --batch 16     # the model that cpu_peers.py makes

Every sequence has 200 tokens. Each figure is the least of 100 steps, each waited for.
"""

import argparse
import time
from typing import Any

import jax

import hex_llm.models.llama as llama
from hex_llm.build import build_runner, find_model
from hex_llm.config import Config
from hex_llm.kernels.rope_write.api import rope_write
from hex_llm.runner.layout import COLUMNS, Layout
from hex_llm.runner.programs import ChooseAny, Forward

CONTEXT = 200


def step_ms(model: str, batch: int) -> float:
    config = Config(
        model=model,
        dtype="bfloat16",
        max_model_len=256,
        max_decode_seqs=batch,
        decode_seqs_padding=1,
        warmup=False,
        compilation_cache_dir="",
    )
    runner, _ = build_runner(config, find_model(config))
    buckets = runner._packer._buckets
    bucket = buckets.choose(batch, decode=True)
    blob, fields = Layout(bucket, runner._shapes).empty()
    fields["counts"][:] = batch
    fields["rows"][:batch, COLUMNS.index("slot")] = range(batch)
    fields["rows"][:batch, COLUMNS.index("kv_len")] = CONTEXT
    fields["tokens"][:batch] = 5
    forward = runner._compiler.get(Forward(bucket))
    choose = runner._compiler.get(ChooseAny(bucket.rows))
    seconds = []
    for _ in range(105):
        started = time.perf_counter()
        runner._kv, runner._slots, computed = forward(runner._params, runner._kv, runner._slots, blob)
        runner._slots, runner._history, tokens, _ = choose(
            runner._slots, runner._history, computed.logits, computed.rows
        )
        tokens.block_until_ready()
        seconds.append(time.perf_counter() - started)
    return min(seconds[5:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    whole = step_ms(arguments.model, arguments.batch)
    jax.clear_caches()  # or else the layer is not traced again

    def rope_only(*args: Any, **options: Any) -> tuple[Any, Any]:
        """What nobody reads is not computed, so the keys and values are not written either."""
        return rope_write(*args, **options)[0], args[2]

    llama.attend = lambda q, pages, batch, **_: q  # pyright: ignore[reportAttributeAccessIssue]
    llama.rope_write = rope_only  # pyright: ignore[reportAttributeAccessIssue]
    without = step_ms(arguments.model, arguments.batch)
    print(f"batch {arguments.batch}: step {whole:.1f} ms, without attention and its KV write {without:.1f} ms")


main()
