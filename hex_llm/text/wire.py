"""What a server and its text process say to each other, as `frames` carries it: settings, then jobs and answers.

Jobs are done one at a time in the order they come, and answered in that order.
"""

from typing import Any, Literal

import msgspec

from hex_llm.errors import ChatTemplateMissing, CheckpointError, ConfigError, ContextTooLong, HexError, RequestError
from hex_llm.text.chat import TEMPLATE_KWARGS


class TextSettings(msgspec.Struct, tag=True, array_like=True, frozen=True, kw_only=True):
    """What a text process needs to know; the first message it gets."""

    tokenizer_folder: str
    max_model_len: int
    mode: Literal["auto", "slow"] = "auto"
    model_folder: str | None = None
    chat_template: str | None = None  # a file
    template_kwargs: tuple[str, ...] = TEMPLATE_KWARGS  # the variables that a request may set
    template_timeout_s: float = 2.0
    template_bytes: int = 256 * 2**20
    encode_timeout_s: float = 30.0


class Encode(msgspec.Struct, tag=True, array_like=True):
    id: int
    texts: list[str]
    add_special_tokens: bool


class EncodeChat(msgspec.Struct, tag=True, array_like=True):
    id: int
    messages: Any
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]


class EncodeBadWords(msgspec.Struct, tag=True, array_like=True):
    id: int
    words: list[str]


class Decode(msgspec.Struct, tag=True, array_like=True):
    id: int
    token_ids: list[int]
    skip_special_tokens: bool


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The tokenizer is loaded; a text of more characters is refused."""

    max_chars: int


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The tokenizer could not be loaded, and the process ends."""

    error: str
    message: str


class Encoded(msgspec.Struct, tag=True, array_like=True):
    id: int
    token_ids: list[list[int]]


class Decoded(msgspec.Struct, tag=True, array_like=True):
    id: int
    text: str


class Refused(msgspec.Struct, tag=True, array_like=True):
    id: int
    error: str
    message: str
    param: str | None
    code: str | None


class Broke(msgspec.Struct, tag=True, array_like=True):
    """The job failed by a fault of ours, which the process has logged."""

    id: int


type Job = Encode | EncodeChat | EncodeBadWords | Decode
type Answer = Encoded | Decoded | Refused | Broke
ToText = TextSettings | Encode | EncodeChat | EncodeBadWords | Decode
FromText = Ready | Failed | Encoded | Decoded | Refused | Broke

_START_ERRORS = {error.__name__: error for error in (CheckpointError, ConfigError)}
_REQUEST_ERRORS = {error.__name__: error for error in (RequestError, ContextTooLong, ChatTemplateMissing)}


def start_error(failed: Failed) -> HexError:
    return _START_ERRORS[failed.error](failed.message)


def refusal(job: Job, error: RequestError) -> Refused:
    name = type(error).__name__
    message = str(error).encode(errors="replace").decode()  # a template can write what is no character
    return Refused(job.id, name if name in _REQUEST_ERRORS else "RequestError", message, error.param, error.code)


def request_error(refused: Refused) -> RequestError:
    return _REQUEST_ERRORS[refused.error](refused.message, param=refused.param, code=refused.code)


def limit_s(job: Job, settings: TextSettings) -> float:
    """How long a job may take."""
    return settings.encode_timeout_s + (settings.template_timeout_s if isinstance(job, EncodeChat) else 0)
