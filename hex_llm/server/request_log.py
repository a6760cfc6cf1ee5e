"""What the log says of requests: a line for each when it has ended, and one every ten seconds about all of them.

No prompt is ever logged, unless logs are verbose.
"""

import asyncio
import logging
import time

from hex_llm import log
from hex_llm.server.exchange import Exchange
from hex_llm.server.state import Server

logger = logging.getLogger(__name__)

_EVERY_S = 10.0
_KEY_DIGITS = 8  # of a key's id
_ADAPTER_DIGITS = 12  # of an adapter's identity
_PROMPT_TOKENS = 64  # of a prompt, in a verbose log


def log_request(server: Server, exchange: Exchange, outcome: str, code: str | None) -> None:
    if server.config.disable_log_requests or not logger.isEnabledFor(logging.INFO):
        return
    parts = [
        exchange.request_id,
        exchange.client,
        f"{exchange.method[:20]} {exchange.path[:100]}",
        str(exchange.status or "-"),
        outcome,
    ]
    if code:
        parts.append(code)
    if exchange.label != exchange.request_id:
        parts.append(f"label={exchange.label}")
    if exchange.key_id:
        parts.append(f"key={exchange.key_id[:_KEY_DIGITS]}")
    if generation := exchange.generation:
        answers = generation.answers
        prompts = [answer for answer in answers if answer.completion.index == 0]
        parts += [
            f"prompt={sum(len(answer.request.prompt) for answer in prompts)}",
            f"cached={sum(answer.num_cached for answer in prompts)}",
            f"output={sum(len(answer.completion.token_ids) for answer in answers)}",
        ]
        if preempted := max(answer.num_preemptions for answer in answers):
            parts.append(f"preempted={preempted}")
        if adapters := dict.fromkeys(answer.request.adapter for answer in prompts if answer.request.adapter):
            parts.append(f"adapter={','.join(each[:_ADAPTER_DIGITS] for each in adapters)}")
        if generation.queued_s is not None:
            parts.append(f"queue={generation.queued_s:.3f}s")
        if generation.first_token_s is not None:
            parts.append(f"first={generation.first_token_s:.3f}s")
        if log.verbose():
            prompt = server.tokenizer.decode(
                list(prompts[0].request.prompt[:_PROMPT_TOKENS]), skip_special_tokens=False
            )
            parts.append(f"prompt: {prompt!r}")
    parts.append(f"total={time.monotonic() - exchange.started:.3f}s")
    logger.info("%s", " ".join(part.encode("unicode_escape").decode() for part in parts))


async def log_throughput(server: Server) -> None:
    """Says every ten seconds what was done, as long as there is something to do."""
    metrics = server.metrics
    before, last = (0, 0), time.monotonic()
    while True:
        await asyncio.sleep(_EVERY_S)
        now, counts = time.monotonic(), (metrics.num_prompt_tokens, metrics.num_generated_tokens)
        stats = server.engine.stats
        if counts != before and stats is not None:
            prompt, generated = ((new - old) / (now - last) for new, old in zip(counts, before, strict=True))
            logger.info(
                "Prompts: %.1f tokens/s, answers: %.1f tokens/s; %d sequences run, %d wait; "
                "KV cache: %.1f %% in use, prefix hits: %.1f %%; preemptions: %d.",
                prompt, generated, stats.running, stats.waiting,
                100 * stats.blocks_used / stats.blocks,
                100 * stats.total_prefix_hits / max(stats.total_prefix_queries, 1),
                stats.total_preemptions,
            )  # fmt: skip
        before, last = counts, now
