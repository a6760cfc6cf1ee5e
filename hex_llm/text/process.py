"""The text process of a server: templates and tokenizers run here, where they can neither stop nor bloat the server.

`python -m hex_llm.text.process FD` serves the socket that it inherits as FD until the other end closes it.
"""

import contextlib
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from hex_llm import faults, log
from hex_llm.errors import CheckpointError, ConfigError, RequestError
from hex_llm.frames import Broken, Decoder, encode, read_frames
from hex_llm.process import begin_child
from hex_llm.text import wire
from hex_llm.text.chat import render_chat
from hex_llm.text.prompt_limit import PromptLimit
from hex_llm.text.template import load_template
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.text.tokenizer_files import read_template

_MEMORY = Path("/proc/self/statm")
# How much more than a prompt can hold a template may write, for what is cut from it afterwards.
_TEMPLATE_EXCESS = 4

_logger = logging.getLogger("hex_llm.text.process")  # whose own name is __main__


class _TimeUp(BaseException):
    """Not an Exception, for a template's code and what it calls may catch those."""


class TextWorker:
    """Does jobs with one tokenizer, each within its limits."""

    def __init__(self, settings: wire.TextSettings):
        folder, model = settings.tokenizer_folder, settings.model_folder
        self._settings = settings
        self._tokenizer = Tokenizer.load(
            Path(folder), mode=settings.mode, model_folder=None if model is None else Path(model)
        )
        self._template = _read_given_template(settings)
        self.limit = PromptLimit.of(self._tokenizer, settings.max_model_len)

    def answer(self, job: wire.Job) -> wire.Answer:
        try:
            faults.reach("text.job")
            return self._do(job)
        except RequestError as error:
            return wire.refusal(job, error)
        except Exception:  # whatever it was, it is this job's alone
            _logger.exception("A text job failed.")
            return wire.Broke(job.id)

    def _do(self, job: wire.Job) -> wire.Answer:
        if isinstance(job, wire.EncodeChat):
            # The timer is off again before the memory is free again, which it would else interrupt.
            with _memory_limit(self._settings.template_bytes):
                text = _within(
                    self._settings.template_timeout_s, lambda: self._render(job), "Rendering the messages", "messages"
                )
            tokens = _within(
                self._settings.encode_timeout_s,
                lambda: self.limit.encode(self._tokenizer, text, add_special_tokens=False, param="messages"),
                "Tokenizing the messages",
                "messages",
            )
            return wire.Encoded(job.id, [tokens])
        return _within(self._settings.encode_timeout_s, lambda: self._convert(job), "Tokenizing the text")

    def _convert(self, job: wire.Encode | wire.EncodeBadWords | wire.Decode) -> wire.Answer:
        match job:
            case wire.Encode():
                special = job.add_special_tokens
                tokens = [self.limit.encode(self._tokenizer, text, special, param="prompt") for text in job.texts]
                return wire.Encoded(job.id, tokens)
            case wire.EncodeBadWords():
                for word in job.words:
                    self.limit.check(word, "bad_words")
                return wire.Encoded(job.id, [[*word] for word in self._tokenizer.encode_bad_words(job.words)])
            case wire.Decode():
                text = self._tokenizer.decode(job.token_ids, skip_special_tokens=job.skip_special_tokens)
                return wire.Decoded(job.id, text)

    def _render(self, job: wire.EncodeChat) -> str:
        return render_chat(
            self._tokenizer,
            job.messages,
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            template=self._template,
            template_kwargs=job.template_kwargs,
            allowed_kwargs=self._settings.template_kwargs,
            max_chars=_TEMPLATE_EXCESS * self.limit.max_chars,
        )


def _read_given_template(settings: wire.TextSettings) -> str | None:
    path = settings.chat_template
    if path is None:
        return None
    try:
        template = read_template(Path(path))
        with _memory_limit(settings.template_bytes):
            _within(settings.template_timeout_s, lambda: load_template(template), "Reading it")
    except (CheckpointError, RequestError) as error:
        raise ConfigError(f"--chat_template={path}: {error}") from error
    except MemoryError:
        raise ConfigError(f"--chat_template={path}: Reading it takes too much memory.") from None
    return template


def _within[Result](seconds: float, do: Callable[[], Result], what: str, param: str | None = None) -> Result:
    """Refuses what takes longer. Code that is not Python goes on to its end first: the server sees to that."""
    try:
        try:
            # Comes again, in case that the first one is lost in a place where Python drops exceptions.
            signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
            return do()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TimeUp:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise RequestError(f"{what} took longer than {seconds:g} s.", param=param) from None


@contextlib.contextmanager
def _memory_limit(more: int) -> Iterator[None]:
    """Makes memory that goes `more` bytes beyond what is in use a MemoryError.

    Only where Python alone runs: the tokenizers library ends the process when it gets no memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if _MEMORY.exists():
        in_use = int(_MEMORY.read_text().split()[0]) * resource.getpagesize()
        limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([in_use + more, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def serve(connection: socket.socket) -> int:
    """Answers jobs until the connection ends; the exit code."""
    messages = read_frames(connection, Decoder[wire.TextSettings | wire.Job](wire.ToText))
    try:
        settings = next(messages, None)
        if not isinstance(settings, wire.TextSettings):
            raise Broken("The first message holds no settings.")
        try:
            worker = TextWorker(settings)
        except (CheckpointError, ConfigError) as error:
            connection.sendall(encode(wire.Failed(type(error).__name__, str(error))))
            return error.exit_code
        connection.sendall(encode(wire.Ready(worker.limit.max_chars)))
        for job in messages:
            if isinstance(job, wire.TextSettings):
                raise Broken("Settings come once.")
            connection.sendall(encode(worker.answer(job)))
    except ConnectionError:  # the server is gone
        return 0
    except Broken as error:
        _logger.error("The text process ends: %s", error)
        return 1
    return 0


def _raise_time_up(signum: int, frame: FrameType | None) -> None:
    raise _TimeUp


def main() -> int:
    begin_child()
    signal.signal(signal.SIGALRM, _raise_time_up)
    log.configure()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        return serve(connection)


if __name__ == "__main__":
    sys.exit(main())
