"""Part `parity`: answers are the same under load as alone, and those of transformers within what bf16 allows."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.h200_part import Results, Settings, run_part
from hex_llm import log
from hex_llm.build import build_engine, find_model
from hex_llm.config import Config
from hex_llm.engine.admission import new_request
from hex_llm.engine.engine import Engine
from hex_llm.engine.request import Request, SamplingParams
from hex_llm.source import EMBEDDED_MODEL
from hex_llm.text.tokenizer import Tokenizer

_TEXT = Path(__file__).parents[1] / "docs"


def measure(settings: Settings, results: Results) -> None:
    log.configure()
    results.command([sys.executable, "-m", "benchmarks.h200", "--only=parity"])
    with results.case("hex-mini under load"):
        engine = _engine(settings, [])
        tokens = _text_tokens()
        results.figure("under_load_mini", _under_load(settings, results, engine, tokens, "hex-mini"))
        del engine
    with results.case("log-probabilities"):
        _logprobs(settings, results)
    with results.case("this shape under load"):
        engine = _engine(settings, [f"--model={settings.model()}", "--load_format=dummy"])
        tokens = np.random.default_rng(7).integers(0, engine.limits.vocab_size, 100_000)
        results.figure("under_load_8b", _under_load(settings, results, engine, tokens, "this shape"))


def _engine(settings: Settings, flags: Sequence[str]) -> Engine:
    words = [*settings.plan.flags.parity, f"--compilation_cache_dir={settings.cache}", *flags]
    config = Config.from_args(words)
    return build_engine(config, find_model(config))


def _text_tokens() -> np.ndarray:
    """The project's own pages, as the embedded model reads them."""
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    text = "\n".join(path.read_text() for path in sorted(_TEXT.glob("*.md")))
    return np.asarray(tokenizer.encode(text, add_special_tokens=False))


def _under_load(settings: Settings, results: Results, engine: Engine, tokens: np.ndarray, name: str) -> float:
    """The share of greedy answers that are the same, token for token, whether others are served beside them or not."""
    sizes = settings.plan.sizes
    longest, output = sizes.parity_tokens
    random = np.random.default_rng(3)
    prompts = [
        tokens[start : start + length].tolist()
        for start, length in zip(
            random.integers(0, len(tokens) - longest, sizes.parity_requests),
            random.integers(2, longest, sizes.parity_requests),
            strict=True,
        )
    ]
    together = _generate(engine, prompts, output)
    alone = [_generate(engine, [prompt], output)[0] for prompt in prompts[: sizes.parity_alone]]
    pairs = list(zip(alone, together, strict=False))
    apart = [_first_difference(a, b) for a, b in pairs]
    results.detail(
        f"{name} under load",
        {
            "requests": len(prompts),
            "compared": len(pairs),
            "tokens each": output,
            "first difference of each": apart,
            "distinct tokens in answers": len({token for answer in together for token in answer}),
        },
    )
    return sum(each is None for each in apart) / len(apart)


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    requests = [new_request(str(i), prompt, sampling, engine.limits) for i, prompt in enumerate(prompts)]
    _run(engine, requests)
    return [request.output for request in requests]


def _run(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def _logprobs(settings: Settings, results: Results) -> None:
    """Of the tokens of prompts of text, ours and transformers', each in bf16 and in float32."""
    tokens, count, length = _text_tokens(), settings.plan.sizes.parity_prompts, 200
    prompts = [tokens[i * length : (i + 1) * length].tolist() for i in range(count)]
    theirs = _ask_transformers(settings, results, prompts)
    ours = {dtype: _our_logprobs(settings, prompts, dtype) for dtype in ("bfloat16", "float32")}
    exact, exact_top = theirs["float32_logprobs"], theirs["float32_likeliest"]
    differences = {
        "ours bf16 to theirs float32": _difference(ours["bfloat16"][0], exact),
        "theirs bf16 to theirs float32": _difference(theirs["bfloat16_logprobs"], exact),
        "ours bf16 to theirs bf16": _difference(ours["bfloat16"][0], theirs["bfloat16_logprobs"]),
        "ours float32 to theirs float32": _difference(ours["float32"][0], exact),
    }
    results.detail("log-probabilities: largest and mean differences", differences)
    agreement = {
        "ours bf16": float(np.mean(ours["bfloat16"][1] == exact_top)),
        "theirs bf16": float(np.mean(theirs["bfloat16_likeliest"] == exact_top)),
        "ours float32": float(np.mean(ours["float32"][1] == exact_top)),
    }
    results.detail("log-probabilities: top-1 agreement with theirs in float32", agreement)
    results.detail("log-probabilities: tokens", len(exact))
    results.figure("logprobs_bf16", differences["ours bf16 to theirs float32"][0])
    own = differences["theirs bf16 to theirs float32"][1]
    results.figure("logprobs_bf16_mean", differences["ours bf16 to theirs float32"][1] / own)
    results.figure("logprobs_f32", differences["ours float32 to theirs float32"][0])
    results.figure("top1_bf16", agreement["ours bf16"])


def _difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    apart = np.abs(one.astype(np.float64) - other)
    return float(apart.max()), float(apart.mean())


def _ask_transformers(settings: Settings, results: Results, prompts: list[list[int]]) -> dict[str, np.ndarray]:
    asked, answer = settings.folder / "prompts.json", settings.folder / "oracle.npz"
    asked.write_text(json.dumps(prompts))
    command = [
        settings.peer_python,
        "-m",
        "benchmarks.h200_oracle",
        str(EMBEDDED_MODEL.resolve()),
        str(asked),
        str(answer),
    ]
    results.command(command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=settings.seconds_left, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    with np.load(answer) as arrays:
        return dict(arrays)


def _our_logprobs(settings: Settings, prompts: list[list[int]], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    engine = _engine(settings, [f"--dtype={dtype}"])
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    requests = [new_request(str(i), prompt, sampling, engine.limits) for i, prompt in enumerate(prompts)]
    _run(engine, requests)
    entries = [entry for request in requests for entry in request.prompt_logprobs[1:]]
    assert all(entry is not None for entry in entries)
    own = np.asarray([entry.logprob for entry in entries if entry])
    return own, np.asarray([entry.top[0][0] for entry in entries if entry])


if __name__ == "__main__":
    run_part(measure)
