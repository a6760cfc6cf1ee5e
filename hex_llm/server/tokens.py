"""/tokenize and /detokenize: texts and conversations as the model sees them, and back."""

import asyncio
from typing import Any

import orjson

from hex_llm.config import Config
from hex_llm.errors import ContextTooLong, RequestError
from hex_llm.server.chat_schema import FIELDS as CHAT_FIELDS
from hex_llm.server.exchange import Exchange
from hex_llm.server.fields import INT32_MAX, Boolean, Field, Fields, Rules, Text, Tokens, fields_schema, read_fields
from hex_llm.server.shared_fields import SHARED
from hex_llm.server.state import Server
from hex_llm.text.tokenizer import Tokenizer

# A chat's fields that its prompt depends on.
_OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "chat_template", "tools")

TOKENIZE: Fields = {
    "model": SHARED["model"],
    "prompt": Field(Text(at_most=INT32_MAX), "A text."),
    "messages": CHAT_FIELDS["messages"]._replace(help="A conversation, in place of a text.", required=False),
    "add_special_tokens": Field(
        Boolean(), "Whether a text begins as the tokenizer likes; true. A conversation is as the template writes it."
    ),
    **{name: CHAT_FIELDS[name] for name in _OF_CHATS},
    "return_token_strs": Field(Boolean(), "Whether the tokens come by name, too."),
}

DETOKENIZE: Fields = {
    "model": SHARED["model"],
    "tokens": Field(Tokens(INT32_MAX), "The tokens, at most as many as the context has.", True),
}


async def tokenize(server: Server, exchange: Exchange) -> None:
    body = await exchange.json()
    server.check_ready()
    values = read_fields(body, TOKENIZE, Rules(server.config))
    server.check_model(values.get("model"))
    with server.admission.enter(1):
        tokens = await _tokens(server, values)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": server.limits.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    if values.get("return_token_strs"):
        answer["token_strs"] = await asyncio.to_thread(_names, server.tokenizer, tokens)
    await exchange.reply(200, orjson.dumps(answer))


async def detokenize(server: Server, exchange: Exchange) -> None:
    body = await exchange.json()
    server.check_ready()
    values = read_fields(body, DETOKENIZE, Rules(server.config))
    server.check_model(values.get("model"))
    tokens, limits = values["tokens"], server.limits
    if len(tokens) > limits.max_model_len:
        raise ContextTooLong(
            f"tokens has {len(tokens)} entries; the context is {limits.max_model_len} tokens.", param="tokens"
        )
    if tokens and max(tokens) >= limits.vocab_size:
        raise RequestError(
            f"tokens has {max(tokens)}; tokens of this model go from 0 to {limits.vocab_size - 1}.", param="tokens"
        )
    # With special tokens, so that it is the way back from /tokenize.
    with server.admission.enter(1):
        text = await server.text.decode(tokens, skip_special_tokens=False)
    await exchange.reply(200, orjson.dumps({"prompt": text}))


def tokenize_openapi(config: Config) -> dict[str, Any]:
    return fields_schema(TOKENIZE, config)


def detokenize_openapi(config: Config) -> dict[str, Any]:
    return fields_schema(DETOKENIZE, config)


async def _tokens(server: Server, values: dict[str, Any]) -> list[int]:
    if ("prompt" in values) == ("messages" in values):
        given = "both are" if "prompt" in values else "neither is"
        raise RequestError(f"Either prompt or messages is tokenized; {given} given.", param="prompt")
    if "prompt" in values:
        for name in _OF_CHATS:
            if name in values:
                raise RequestError(f"{name} is about messages, and prompt is given.", param=name)
        return await server.text.encode(values["prompt"], values.get("add_special_tokens", True))
    if values.get("add_special_tokens"):
        raise RequestError(
            "add_special_tokens is true, but the special tokens of messages are written by the chat template.",
            param="add_special_tokens",
        )
    going_on = values.get("continue_final_message", False)
    return await server.text.encode_chat(
        values["messages"],
        add_generation_prompt=values.get("add_generation_prompt", not going_on),
        continue_final_message=going_on,
        template_kwargs=values.get("chat_template_kwargs", {}),
    )


def _names(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [tokenizer.token_name(token) or "" for token in tokens]
