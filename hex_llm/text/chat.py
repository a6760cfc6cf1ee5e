"""A conversation as a prompt, by the model's chat template."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from hex_llm.errors import ChatTemplateMissing, RequestError
from hex_llm.text.content import as_read
from hex_llm.text.template import render, variables_of
from hex_llm.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
# The variables of a template that a request may set, where nobody says otherwise.
TEMPLATE_KWARGS = ("enable_thinking",)

# Put behind a message that is to be continued, to see where the template leaves it; the space, to see whether it
# trims messages.
_MARK = "[hex-llm:continue-here] "
_MAX_SHOWN = 100


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    allowed_kwargs: Collection[str] = TEMPLATE_KWARGS,
) -> list[int]:
    """The tokens of a conversation. The template writes the special tokens, so that none are added."""
    text = render_chat(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template=template,
        template_kwargs=template_kwargs,
        allowed_kwargs=allowed_kwargs,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    allowed_kwargs: Collection[str] = TEMPLATE_KWARGS,
    max_chars: int | None = None,
) -> str:
    """The text of a conversation, by `template` or else the model's own.

    `add_generation_prompt` opens the assistant's answer; `continue_final_message` leaves the last message open, for
    the model to go on with it. `template_kwargs` are variables of the template. More than `max_chars` are refused.
    """
    template = template or tokenizer.chat_template
    if template is None:
        raise ChatTemplateMissing(
            "The model has no chat template, so that messages cannot be made into a prompt; send a prompt instead."
        )
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both true; the one opens an answer, the other the "
            "last message.",
            param="continue_final_message",
        )
    special_tokens = tokenizer.special_tokens
    checked = as_read(template, check_messages(messages), special_tokens)
    variables = {
        **special_tokens,
        **_check_kwargs(template_kwargs or {}, allowed_kwargs, template),
        "messages": [*checked[:-1], _marked(checked[-1])] if continue_final_message else checked,
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    text = render(template, variables, max_chars=max_chars)
    return _cut_at_mark(text, checked[-1]["content"]) if continue_final_message else text


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _MARK}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]}


def _cut_at_mark(text: str, content: str | Sequence[Mapping[str, Any]]) -> str:
    place = text.rfind(_MARK.strip())
    end = content if isinstance(content, str) else content[-1]["text"]
    if place < 0 or end.strip() not in text:
        raise RequestError(
            "The last message cannot be continued: the chat template does not show it as it is.",
            param="continue_final_message",
        )
    # A template that trims messages has trimmed the mark's space and not the spaces that are now before it.
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()


def _check_kwargs(kwargs: Mapping[str, Any], allowed: Collection[str], template: str) -> Mapping[str, Any]:
    for name, value in kwargs.items():
        if name not in allowed:
            raise RequestError(
                f"chat_template_kwargs has {_shown(name)}, which is not one of {', '.join(sorted(allowed))}.",
                param="chat_template_kwargs",
            )
        if name == "enable_thinking" and not isinstance(value, bool):
            raise RequestError(
                f"chat_template_kwargs.enable_thinking is a {type(value).__name__}, not true or false.",
                param="chat_template_kwargs",
            )
        # To ask for nothing of a template that knows nothing of it is no mistake.
        if value not in (False, None) and name not in variables_of(template):
            raise RequestError(
                f"chat_template_kwargs has {name!r}, which the model's chat template knows nothing of.",
                param="chat_template_kwargs",
            )
    return kwargs


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, each content a string or a list of text parts; what else they have is the template's affair."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is a {type(messages).__name__}, not a list.", param="messages")
    if not messages:
        raise RequestError("messages is empty; a conversation has at least one message.", param="messages")
    return [_check_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{param} is a {type(message).__name__}, not an object.", param=param)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{param}.role is {_shown(role)}, not one of {', '.join(ROLES)}.", param=f"{param}.role")
    content, calls = message.get("content"), message.get("tool_calls")
    # An answer that only called tools has no content.
    content = "" if content is None and role == "assistant" and calls else _check_content(content, f"{param}.content")
    checked = {**message, "content": content}
    return checked | {"tool_calls": [_call(call) for call in calls]} if isinstance(calls, list) else checked


def _check_content(content: Any, param: str) -> str | list[Mapping[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{param} is {'missing' if content is None else f'a {type(content).__name__}'}; it must be a string or a "
            "list of text parts.",
            param=param,
        )
    for place, part in enumerate(content):
        _check_part(part, f"{param}[{place}]")
    return list(content) or ""


def _check_part(part: Any, param: str) -> None:
    if not isinstance(part, Mapping):
        raise RequestError(f"{param} is a {type(part).__name__}, not an object.", param=param)
    if part.get("type") != "text":
        raise RequestError(
            f"{param}.type is {_shown(part.get('type'))}; this model reads parts of type 'text' only.",
            param=f"{param}.type",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{param}.text is a {type(text).__name__}, not a string.", param=f"{param}.text")


def _call(call: Any) -> Any:
    """A call of a tool with its arguments as an object, which templates write as JSON; OpenAI sends them as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:  # what a model wrote need not be JSON
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _shown(value: Any) -> str:
    """A client's value as a message quotes it."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
