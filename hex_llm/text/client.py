"""A server's end of its text process: jobs that may take long, without the event loop ever waiting for one."""

import asyncio
import contextlib
import itertools
import logging
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hex_llm.errors import HexError, RequestError, ServerError, Unavailable
from hex_llm.frames import Broken, FrameProtocol, attach
from hex_llm.process import start_child
from hex_llm.text import wire
from hex_llm.text.prompt_limit import PromptLimit
from hex_llm.text.tokenizer import no_character

# How many jobs lie at the process's door, so that it need not wait for the event loop between two of them.
_MAX_SENT = 16
# How often a job may be in hand when the process goes, and how often the process may fail to come back before those
# who wait are told.
_MAX_TRIES = 2
_MAX_STARTS = 3
_START_TIMEOUT_S = 300
_MAX_PAUSE_S = 10.0
_MAX_ID = 2**32

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A job and who waits for its answer; whoever is done with waiting has gone away."""

    job: wire.Job
    answer: asyncio.Future[wire.Answer]
    num_tries: int = 0


@dataclass(slots=True, eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    protocol: FrameProtocol[Any]
    ready: asyncio.Future[wire.Ready]
    gone: asyncio.Event


class TextClient:
    """Answers of a text process, as the functions of `text` would give them, errors too.

    A process that dies is replaced and its jobs are done again; one that is stuck in a job is killed, and the job is
    refused.
    """

    def __init__(self, settings: wire.TextSettings, *, stuck_after_s: float = 3.0):
        """For `start`; `stuck_after_s` is how far beyond its time limit a job may go before the process is killed."""
        self._settings = settings
        self._stuck_after_s = stuck_after_s
        self._waiting: deque[_Waiting] = deque()
        self._sent: deque[_Waiting] = deque()  # the first is in hand
        self._child: _Child | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._num_jobs = 0
        self._limit: PromptLimit | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def start(cls, settings: wire.TextSettings, *, stuck_after_s: float = 3.0) -> "TextClient":
        """A client whose process has loaded the tokenizer; where it cannot, the error that says why."""
        client = cls(settings, stuck_after_s=stuck_after_s)
        child = await client._bring_up()
        client._keeper = asyncio.create_task(client._keep(child))
        return client

    @property
    def process_id(self) -> int | None:
        """The process that does the jobs now; None while there is none."""
        return None if self._child is None else self._child.process.pid

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        (tokens,) = await self.encode_many([text], add_special_tokens)
        return tokens

    async def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            self._check(text, "prompt")
        return await self._encoded(wire.Encode(self._next_id(), list(texts), add_special_tokens))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        kwargs = dict(template_kwargs or {})
        job = wire.EncodeChat(self._next_id(), messages, add_generation_prompt, continue_final_message, kwargs)
        (tokens,) = await self._encoded(job)
        return tokens

    async def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        if not words:
            return ()
        for word in words:
            self._check(word, "bad_words")
        return tuple(tuple(word) for word in await self._encoded(wire.EncodeBadWords(self._next_id(), list(words))))

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if ids and not 0 <= min(ids) <= max(ids) < _MAX_ID:
            raise RequestError(f"A token id is not from 0 to {_MAX_ID - 1}.", param="tokens")
        answer = await self._do(wire.Decode(self._next_id(), list(ids), skip_special_tokens))
        assert isinstance(answer, wire.Decoded)
        return answer.text

    async def close(self) -> None:
        """Ends the process; who still waits is told."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        self._give_up(Unavailable("The server is shutting down.", code="server_shutdown"))

    def _next_id(self) -> int:
        self._num_jobs += 1
        return self._num_jobs

    def _check(self, text: str, param: str) -> None:
        assert self._limit is not None
        self._limit.check(text, param)

    async def _encoded(self, job: wire.Encode | wire.EncodeChat | wire.EncodeBadWords) -> list[list[int]]:
        answer = await self._do(job)
        assert isinstance(answer, wire.Encoded)
        return answer.token_ids

    async def _do(self, job: wire.Job) -> wire.Answer:
        if self._closed:
            raise Unavailable("The server is shutting down.", code="server_shutdown")
        waiting = _Waiting(job, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._send_more()
        try:
            answer = await waiting.answer
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):  # it has been sent
                self._waiting.remove(waiting)
            raise
        if isinstance(answer, wire.Refused):
            raise wire.request_error(answer)
        if isinstance(answer, wire.Broke):
            raise ServerError("An internal error kept the text from being processed.")
        return answer

    def _send_more(self) -> None:
        while self._child is not None and self._waiting and len(self._sent) < _MAX_SENT:
            waiting = self._waiting.popleft()
            if waiting.answer.done():
                continue
            try:
                self._child.protocol.send(waiting.job)
            except (UnicodeEncodeError, OverflowError, RecursionError, TypeError, Broken) as error:
                _settle(waiting.answer, _unsendable(waiting.job, error))
                continue
            self._sent.append(waiting)
            if len(self._sent) == 1:
                self._watch()

    def _watch(self) -> None:
        """Starts the clock of the job in hand."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._sent:
            loop, waiting = asyncio.get_running_loop(), self._sent[0]
            limit_s = wire.limit_s(waiting.job, self._settings) + self._stuck_after_s
            # An event loop that was held up itself gets a moment to find that the answer has come.
            self._alarm = loop.call_later(limit_s, lambda: loop.call_later(0.1, self._kill_stuck, waiting, limit_s))

    def _kill_stuck(self, waiting: _Waiting, limit_s: float) -> None:
        if self._child is None or not self._sent or self._sent[0] is not waiting:
            return
        _logger.warning("The text process is stuck in a job for %g s and is killed.", limit_s)
        param = _param(waiting.job)
        _settle(waiting.answer, RequestError(f"The {param or 'text'} took longer than {limit_s:g} s.", param=param))
        self._child.process.kill()

    def _take(self, child: _Child, message: Any) -> None:
        if isinstance(message, wire.Ready | wire.Failed):
            _settle(child.ready, message if isinstance(message, wire.Ready) else wire.start_error(message))
            return
        if not self._sent or self._sent[0].job.id != message.id:
            raise Broken("An answer came that belongs to no job.")
        waiting = self._sent.popleft()
        _settle(waiting.answer, message)
        self._watch()
        self._send_more()

    async def _keep(self, child: _Child) -> None:
        """Sees to it that there is a process, until cancelled."""
        try:
            while True:
                await child.gone.wait()
                await _end(child)
                self._take_back()
                _logger.warning("The text process has ended (%s); another one is started.", child.process.returncode)
                child = await self._bring_back()
        finally:
            self._child = None
            await _end(child)

    async def _bring_back(self) -> _Child:
        for num_failures in itertools.count(1):
            try:
                return await self._bring_up()
            except (HexError, OSError) as error:
                _logger.error("The text process does not start: %s", error)
            if num_failures >= _MAX_STARTS:
                self._give_up(ServerError("The process that tokenizes cannot be started."))
            await asyncio.sleep(min(0.1 * 2**num_failures, _MAX_PAUSE_S))
        raise AssertionError("unreachable")

    def _take_back(self) -> None:
        """Queues the jobs of a process that is gone again: the one in hand may have been its end."""
        self._child = None
        if self._sent:
            first = self._sent[0]
            first.num_tries += 1
            if first.num_tries == _MAX_TRIES:
                _settle(first.answer, ServerError("The process that tokenizes has died of this text twice."))
        self._waiting.extendleft(reversed([waiting for waiting in self._sent if not waiting.answer.done()]))
        self._sent.clear()
        self._watch()

    def _give_up(self, error: HexError) -> None:
        for waiting in (*self._sent, *self._waiting):
            _settle(waiting.answer, error)
        self._sent.clear()
        self._waiting.clear()
        self._watch()

    async def _bring_up(self) -> _Child:
        child = await self._spawn()
        try:
            child.protocol.send(self._settings)
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await child.ready
        except BaseException:
            await _end(child)
            raise
        self._limit = PromptLimit(self._settings.max_model_len, ready.max_chars)
        self._child = child
        self._send_more()
        return child

    async def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # On this thread, which lives as long as the loop: the child dies with the thread that made it.
                file = theirs.fileno()
                environment = {"TOKENIZERS_PARALLELISM": "false"}
                process = start_child("hex_llm.text.process", [str(file)], [file], environment=environment)
        except BaseException:
            ours.close()
            raise
        gone, ready = asyncio.Event(), asyncio.get_running_loop().create_future()

        def lost() -> None:
            gone.set()
            _settle(ready, ServerError("It ended before it was ready."))

        protocol = FrameProtocol(wire.FromText, lambda message: self._take(child, message), lost)
        child = _Child(process, protocol, ready, gone)
        try:
            await attach(protocol, ours)
        except BaseException:
            await _end(child)
            raise
        return child


async def _end(child: _Child) -> None:
    """Ends a process and waits for it; a second time does nothing."""
    child.protocol.close()
    child.process.kill()
    if child.ready.done() and not child.ready.cancelled():
        child.ready.exception()  # which nobody may have asked for
    await asyncio.to_thread(child.process.wait)


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """Gives a future its outcome, unless whoever waited has gone or has been told already."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _param(job: wire.Job) -> str | None:
    return "messages" if isinstance(job, wire.EncodeChat) else None


def _unsendable(job: wire.Job, error: Exception) -> RequestError:
    if isinstance(error, UnicodeEncodeError):
        return no_character(error, param=_param(job))
    return RequestError(
        "The request is too large, too deep, or holds numbers too large to be made into a prompt.", param=_param(job)
    )
