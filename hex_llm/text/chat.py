"""A conversation as a prompt, by the model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from hex_llm.errors import ChatTemplateMissing, RequestError
from hex_llm.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")

# What a template's code can raise on messages that it does not expect; transformers adds ValueErrors of its own.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template: str | None = None,
) -> list[int]:
    """The tokens of a conversation. The template writes the special tokens, so that none are added."""
    text = render_chat(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template=template,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template: str | None = None,
) -> str:
    """The text of a conversation, by `template` or else the model's own.

    `add_generation_prompt` opens the assistant's answer; `continue_final_message` leaves the last message open, for
    the model to go on with it.
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
    checked = check_messages(messages)
    try:
        return tokenizer.render(
            checked,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except _TEMPLATE_ERRORS as error:
        raise RequestError(f"The chat template refuses the messages: {error}", param="messages") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with every content as one string; a key besides role and content is the template's affair."""
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
        raise RequestError(f"{param}.role is {role!r}, not one of {', '.join(ROLES)}.", param=f"{param}.role")
    content = message.get("content")
    # An answer that only called tools has no content.
    if content is None and role == "assistant" and message.get("tool_calls"):
        return {**message, "content": ""}
    return {**message, "content": _content_text(content, f"{param}.content")}


def _content_text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"{param} is {'missing' if content is None else f'a {type(content).__name__}'}; it must be a string or a "
            "list of text parts.",
            param=param,
        )
    return "\n".join(_part_text(part, f"{param}[{place}]") for place, part in enumerate(content))


def _part_text(part: Any, param: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f"{param} is a {type(part).__name__}, not an object.", param=param)
    if part.get("type") != "text":
        raise RequestError(
            f"{param}.type is {part.get('type')!r}; this model reads parts of type 'text' only.", param=f"{param}.type"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{param}.text is a {type(text).__name__}, not a string.", param=f"{param}.text")
    return text
