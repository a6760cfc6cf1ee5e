"""`hex-llm bench serve`: how fast a server is under load, seen from outside."""

import asyncio
import json
import logging
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from hex_llm.bench.datasets import (
    RandomLengths,
    SonnetLengths,
    custom_prompts,
    random_prompts,
    sharegpt_prompts,
    sonnet_prompts,
)
from hex_llm.bench.http_client import HttpClient, HttpError
from hex_llm.bench.load import Outcome, Target, arrival_times, send_all
from hex_llm.bench.metrics import LATENCIES, Counted, Summary, summarize
from hex_llm.bench.plot import check_plot, write_plot
from hex_llm.bench.prompt import Prompt
from hex_llm.bench.report import details, report, result
from hex_llm.bench.served_model import list_models, tokenizer_folder
from hex_llm.bench.server_counts import ServerCounts, read_counts
from hex_llm.bench.serving_flags import Options, Settings, parse_settings
from hex_llm.errors import ConfigError, StartError
from hex_llm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ERRORS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a model on a server. Without a tokenizer, only the server can count tokens."""

    target: Target
    model: str
    tokenizer_id: str
    tokenizer: Tokenizer | None


def main(argv: Sequence[str]) -> int:
    """Returns 1 where a request failed."""
    settings = parse_settings(argv)
    options = settings.options
    if options.plot is not None:
        check_plot(Path(options.plot))
    if options.save_result:
        _make_folder(Path(options.result_dir))
    _allow_many_connections()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        failed = runner.run(_run(settings))
    return 1 if failed else 0


async def _run(settings: Settings) -> int:
    """Measures once for each concurrency; returns how many requests failed in all."""
    options = settings.options
    client = HttpClient(settings.base_url, _default_headers() | dict(settings.headers))
    try:
        subject = await _subject(client, settings)
        await _warm_up(subject, settings)
        points = [
            (each, await _measure(subject, settings, number, each))
            for number, each in enumerate(settings.concurrencies)
        ]
    finally:
        client.close()
    if options.plot is not None:
        write_plot(Path(options.plot), f"{subject.model or settings.base_url}, {options.dataset_name} prompts", points)
    return sum(summary.failed for _, summary in points)


async def _subject(client: HttpClient, settings: Settings) -> Subject:
    options = settings.options
    model = options.served_model_name or options.model
    listed = {}
    if model is None:
        try:
            async with asyncio.timeout(options.timeout):
                models = await list_models(client)
        except (HttpError, TimeoutError) as error:
            reason = "It does not answer." if isinstance(error, TimeoutError) else error
            raise StartError(f"{settings.base_url} cannot be asked for its models. {reason}") from None
        if not models and options.api.names_model:
            raise StartError(f"{settings.base_url}/v1/models lists no model; name it with --model.")
        listed = models[0] if models else {}
    model = model or listed.get("id", "")
    folder = tokenizer_folder(options.tokenizer, (options.model, model, str(listed.get("root", ""))))
    if folder is None:
        _check_possible_without_tokenizer(options)
    tokenizer = None if folder is None else Tokenizer.load(folder)
    target = Target(client, options.api, settings.endpoint, options.timeout)
    return Subject(target, model, "" if folder is None else str(folder), tokenizer)


def _check_possible_without_tokenizer(options: Options) -> None:
    if options.dataset_name in ("sharegpt", "sonnet"):
        raise ConfigError(f"--dataset_name={options.dataset_name} needs --tokenizer, to know how long prompts are.")
    if options.dataset_name == "random" and not options.api.takes_token_ids:
        raise ConfigError(
            f"--backend={options.backend} needs --tokenizer for random prompts, since it takes no token ids."
        )


async def _warm_up(subject: Subject, settings: Settings) -> None:
    count = settings.options.num_warmups
    if not count:
        return
    prompts = _prompts(subject, settings, count, len(settings.concurrencies))
    outcomes, _ = await send_all(
        subject.target,
        _bodies(subject, settings, prompts),
        [0.0] * count,
        max_concurrency=settings.concurrencies[0],
        on_done=lambda: None,
    )
    for outcome in outcomes:
        if outcome.error is not None:
            raise StartError(f"A request before the measurement failed. {outcome.error}")


async def _measure(subject: Subject, settings: Settings, number: int, concurrency: int | None) -> Summary:
    options = settings.options
    prompts = _prompts(subject, settings, options.num_prompts, number)
    random = np.random.default_rng([options.seed, number, 1])
    due = arrival_times(len(prompts), options.request_rate, options.burstiness, random)
    silent = options.disable_tqdm or not sys.stderr.isatty()
    before = await read_counts(subject.target.client)
    with Progress(console=Console(stderr=True), transient=True, disable=silent) as bar:
        task = bar.add_task("Requests", total=len(prompts))
        outcomes, duration = await send_all(
            subject.target,
            _bodies(subject, settings, prompts),
            due,
            max_concurrency=concurrency,
            on_done=lambda: bar.advance(task),
        )
    after = None if before is None else await read_counts(subject.target.client)
    served = None if before is None or after is None else after.since(before)
    counted = [_count(prompt, outcome, subject, settings) for prompt, outcome in zip(prompts, outcomes, strict=True)]
    answered = [each for each in counted if isinstance(each, Counted)]
    summary = summarize(
        answered,
        failed=len(counted) - len(answered),
        duration_s=duration,
        latencies=LATENCIES if options.api.streams else ("e2el",),
        percentiles=settings.percentiles,
        goals_ms=settings.goals_ms,
    )
    _tell_errors([each for each in counted if isinstance(each, str)], len(counted))
    _tell_doubts(subject, prompts, outcomes)
    print(
        report(
            summary,
            max_concurrency=concurrency,
            request_rate=options.request_rate,
            latencies=settings.latencies,
            served=served,
        ),
        flush=True,
    )
    if options.save_result:
        _save(subject, settings, concurrency, summary, counted, served)
    return summary


def _prompts(subject: Subject, settings: Settings, count: int, number: int) -> list[Prompt]:
    """The prompts of a run. Runs have different random ones, or a server's prefix cache would know them."""
    options, tokenizer = settings.options, subject.tokenizer
    random = np.random.default_rng([options.seed, number, 0])
    if options.dataset_path is None:
        lengths = RandomLengths(
            input=options.random_input_len,
            output=options.random_output_len,
            prefix=options.random_prefix_len,
            range_ratio=options.random_range_ratio,
        )
        return random_prompts(count, lengths, tokenizer, random)
    path = Path(options.dataset_path)
    if options.dataset_name == "custom" or tokenizer is None:
        return custom_prompts(path, count, options.custom_output_len, tokenizer)
    if options.dataset_name == "sharegpt":
        return sharegpt_prompts(path, count, options.sharegpt_output_len, tokenizer, random)
    lengths = SonnetLengths(
        input=options.sonnet_input_len, output=options.sonnet_output_len, prefix=options.sonnet_prefix_len
    )
    return sonnet_prompts(path, count, lengths, tokenizer, random)


def _bodies(subject: Subject, settings: Settings, prompts: Sequence[Prompt]) -> list[bytes]:
    options = settings.options
    models = options.adapters or (subject.model,)  # which take turns
    return [
        options.api.message(each, models[number % len(models)], options.sampling, settings.extra_body)
        for number, each in enumerate(prompts)
    ]


def _count(prompt: Prompt, outcome: Outcome, subject: Subject, settings: Settings) -> Counted | str:
    """The tokens as the server counts them; else as asked for, or by the tokenizer, or by chunks. Or the error."""
    if outcome.error is not None:
        return outcome.error
    output_tokens = outcome.output_tokens
    if output_tokens is None:
        full = settings.options.ignore_eos and not settings.options.api.tells_usage
        if full and "max_tokens" not in settings.extra_body:
            output_tokens = prompt.output_tokens
        elif subject.tokenizer:
            output_tokens = len(subject.tokenizer.encode(outcome.text, add_special_tokens=False))
        else:
            output_tokens = len(outcome.gaps_s) + 1
    return Counted(outcome, outcome.input_tokens or prompt.input_tokens or 0, output_tokens)


def _tell_errors(errors: Sequence[str], total: int) -> None:
    if not errors:
        return
    logger.error("%d of %d requests failed:", len(errors), total)
    kinds = Counter(errors)
    for error, times in list(kinds.items())[:ERRORS_SHOWN]:
        logger.error("%d of them: %s", times, error)
    if len(kinds) > ERRORS_SHOWN:
        logger.error("and %d other errors.", len(kinds) - ERRORS_SHOWN)


def _tell_doubts(subject: Subject, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> None:
    """Says where a count is not what one would take it for."""
    answered = [(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True) if outcome.error is None]
    if not subject.tokenizer and any(outcome.output_tokens is None for _, outcome in answered):
        logger.warning("The server tells no usage and there is no --tokenizer: each chunk is taken for one token.")
    if any(prompt.input_tokens is outcome.input_tokens is None for prompt, outcome in answered):
        logger.warning("The server tells no usage and there is no --tokenizer: input tokens are not counted.")
    told = [(prompt.input_tokens, outcome.input_tokens) for prompt, outcome in answered]
    both = [(own, server) for own, server in told if own is not None and server is not None]
    if subject.target.backend.takes_token_ids and any(own != server for own, server in both):
        logger.warning(
            "The server counts %d input tokens where the prompts have %d: is --tokenizer the model's?",
            sum(server for _, server in both),
            sum(own for own, _ in both),
        )


def _save(
    subject: Subject,
    settings: Settings,
    concurrency: int | None,
    summary: Summary,
    counted: Sequence[Counted | str],
    served: ServerCounts | None,
) -> None:
    options = settings.options
    now = time.strftime("%Y%m%d-%H%M%S")
    rate = "inf" if options.request_rate == float("inf") else options.request_rate
    limit = "" if concurrency is None else f"-concurrency{concurrency}"
    content = {
        "date": now,
        "backend": options.backend,
        "model_id": subject.model,
        "tokenizer_id": subject.tokenizer_id,
        "num_prompts": options.num_prompts,
        "request_rate": rate,
        "burstiness": options.burstiness,
        "max_concurrency": concurrency,
        **result(summary, settings.latencies, served),
        **(details(counted) if options.save_detailed else {}),
    }
    if options.result_filename is None:
        name = f"{options.backend}-{float(rate)}qps{limit}-{Path(subject.model).name or 'model'}-{now}.json"
    elif len(settings.concurrencies) > 1:
        name = f"{Path(options.result_filename).stem}{limit}.json"
    else:
        name = options.result_filename
    path = Path(options.result_dir) / name
    try:
        path.write_text(json.dumps(content) + "\n")
    except OSError as error:
        raise StartError(f"{path} cannot be written: {error.strerror}.") from None
    logger.info("The result is in %s.", path)


def _default_headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"User-Agent": "hex-llm-bench", **({"Authorization": f"Bearer {key}"} if key else {})}


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--result_dir={folder} cannot be made: {error.strerror}.") from None


def _allow_many_connections() -> None:
    """Every request that is under way has a connection, and the usual limit is 1024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _loop_factory():
    try:
        import uvloop
    except ImportError:  # there is none for every platform
        return None
    return uvloop.new_event_loop
