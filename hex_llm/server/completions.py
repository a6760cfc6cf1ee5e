"""/v1/completions."""

import time
from collections.abc import Sequence

from hex_llm.server.completion_response import completion_response, completion_stream
from hex_llm.server.completion_schema import CompletionRequest, read_completion
from hex_llm.server.exchange import Exchange
from hex_llm.server.generation import Prompt, generate
from hex_llm.server.rendering import render
from hex_llm.server.state import Server
from hex_llm.server.streaming import stream


async def completions(server: Server, exchange: Exchange) -> None:
    body = await exchange.json()
    server.check_ready()
    asked = read_completion(body, server.config, server.tokenizer.defaults.given)
    server.check_model(asked.model)
    samplings = [asked.sampling] * len(asked.prompts)

    async def encode() -> Sequence[Prompt]:
        prompts = await encode_prompts(server, asked)
        adapter = await server.find_adapter(asked.adapter, exchange)
        return [Prompt(tokens, adapter) for tokens in prompts]

    async with generate(server, exchange, encode, samplings, cache_salt=asked.cache_salt) as generation:
        facts = {
            "id": f"cmpl-{asked.request_id or exchange.request_id}",
            "created": int(time.time()),
            "model": asked.model or asked.adapter or server.names[0],
            "echo": await _echo(server, asked) if asked.echo else (),
        }
        if asked.stream:
            frames = completion_stream(asked, generation.answers, server.tokenizer, **facts)
            await stream(exchange, generation, frames)
        else:
            await generation.finish()
            answers = generation.answers
            body = await render(answers, lambda: completion_response(asked, answers, server.tokenizer, **facts))
            await exchange.reply(200, body)


async def encode_prompts(server: Server, asked: CompletionRequest) -> list[list[int]]:
    texts = [prompt for prompt in asked.prompts if isinstance(prompt, str)]
    encoded = iter(await server.text.encode_many(texts, asked.add_special_tokens) if texts else ())
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in asked.prompts]


async def _echo(server: Server, asked: CompletionRequest) -> list[str]:
    skip = asked.sampling.skip_special_tokens
    return [prompt if isinstance(prompt, str) else await server.text.decode(prompt, skip) for prompt in asked.prompts]
