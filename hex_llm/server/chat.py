"""/v1/chat/completions."""

import time
from collections.abc import Callable, Sequence

from hex_llm.errors import RequestError
from hex_llm.server.chat_response import chat_response, chat_stream
from hex_llm.server.chat_schema import ChatRequest, read_chat
from hex_llm.server.exchange import Exchange
from hex_llm.server.generation import Prompt, generate
from hex_llm.server.rendering import render
from hex_llm.server.state import Server
from hex_llm.server.streaming import stream


async def chat_completions(server: Server, exchange: Exchange) -> None:
    body = await exchange.json()
    server.check_ready()
    asked = read_chat(body, server.config, server.tokenizer.defaults.given)
    server.check_model(asked.model)
    await answer_chat(server, exchange, asked)


async def answer_chat(
    server: Server, exchange: Exchange, asked: ChatRequest, *, wrap: Callable[[bytes], bytes] = bytes
) -> None:
    """Answers a conversation, as one object in what `wrap` puts around it, or as a stream."""

    async def encode() -> Sequence[Prompt]:
        tokens = await encode_conversation(server, asked)
        return [Prompt(tokens, await server.find_adapter(asked.adapter, exchange))]

    facts = {
        "id": f"chatcmpl-{asked.request_id or exchange.request_id}",
        "created": int(time.time()),
        "model": asked.model or asked.adapter or server.names[0],
    }
    try:
        async with generate(server, exchange, encode, [asked.sampling], cache_salt=asked.cache_salt) as generation:
            if asked.stream:
                frames = chat_stream(asked, generation.answers, server.tokenizer, **facts)
                await stream(exchange, generation, frames)
            else:
                await generation.finish()
                answers = generation.answers
                body = await render(answers, lambda: chat_response(asked, answers, server.tokenizer, **facts))
                await exchange.reply(200, wrap(body))
    except RequestError as error:
        if error.param == "prompt":  # which to the client are its messages
            error.param = "messages"
        raise


async def encode_conversation(server: Server, asked: ChatRequest) -> list[int]:
    return await server.text.encode_chat(
        asked.messages,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        template_kwargs=asked.template_kwargs,
    )
