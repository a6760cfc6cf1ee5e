"""The text process answers as the functions would, and whatever happens to it, every job has one answer."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from hex_llm.errors import (
    ChatTemplateMissing,
    CheckpointError,
    ConfigError,
    ContextTooLong,
    HexError,
    RequestError,
    ServerError,
    Unavailable,
)
from hex_llm.frames import Decoder, encode, read_frames
from hex_llm.text import wire
from hex_llm.text.chat import encode_chat
from hex_llm.text.client import TextClient
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.text.wire import TextSettings

HEX_MINI = Path(__file__).parents[2] / "hex_llm/assets/hex-mini"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HI = [{"role": "user", "content": "Hi"}]


def settings(**changes: Any) -> TextSettings:
    return TextSettings(**{"tokenizer_folder": str(HEX_MINI), "max_model_len": 2048} | changes)


def with_template(folder: Path, template: str, **changes: Any) -> TextSettings:
    """A template that does what `template` says where the message is `Go`."""
    path = folder / "template.jinja"
    path.write_text(
        "{% if messages[0].content == 'Go' %}" + template + "{% else %}{{ messages[0].content }}{% endif %}"
    )
    return settings(chat_template=str(path), **changes)


@contextlib.asynccontextmanager
async def started(settings: TextSettings, **options: Any) -> AsyncIterator[TextClient]:
    client = await TextClient.start(settings, **options)
    try:
        yield client
    finally:
        await client.close()


def run(coroutine: Coroutine[Any, Any, None], seconds: float = 30) -> None:
    asyncio.run(asyncio.wait_for(coroutine, seconds))


def say(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


async def error_of(work: Awaitable[object]) -> HexError:
    with pytest.raises(HexError) as raised:
        await work
    return raised.value


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


async def longest_pauses(work: Awaitable[None]) -> tuple[float, float]:
    """The longest that the event loop is away while work is done, by the clock and by its own work.

    The second is what counts: on a busy machine the loop also waits for its turn.
    """
    longest = [0.0, 0.0]

    async def beat() -> None:
        last = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter(), time.thread_time()
            longest[:] = (max(pause, end - start) for pause, start, end in zip(longest, last, now, strict=True))
            last = now

    beating = asyncio.create_task(beat())
    await work
    beating.cancel()
    return longest[0], longest[1]


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_answers_are_those_of_the_functions(runner: Callable[[Any], None]):
    tokenizer = Tokenizer.load(HEX_MINI)
    text = "Hello, 你好 🚀<|end|>\n"
    answers = [*HI, {"role": "assistant", "content": "So"}]

    async def work() -> None:
        async with started(settings()) as client:
            assert await client.encode(text) == tokenizer.encode(text)
            assert await client.encode(text, add_special_tokens=False) == tokenizer.encode(text, False)
            assert await client.encode_many([text, "", "a"]) == [tokenizer.encode(part) for part in (text, "", "a")]
            assert await client.encode_many([]) == []
            ids = tokenizer.encode(text)
            assert await client.decode(ids) == tokenizer.decode(ids)
            assert await client.decode(ids, False) == tokenizer.decode(ids, skip_special_tokens=False)
            assert await client.decode([10**6]) == ""
            assert await client.encode_bad_words(["the", "a b"]) == tokenizer.encode_bad_words(["the", "a b"])
            assert await client.encode_bad_words([]) == ()
            assert await client.encode_chat(HI) == encode_chat(tokenizer, HI)
            assert await client.encode_chat(
                answers, add_generation_prompt=False, continue_final_message=True
            ) == encode_chat(tokenizer, answers, add_generation_prompt=False, continue_final_message=True)

    runner(work())


def test_errors_are_those_of_the_functions():
    tokenizer = Tokenizer.load(HEX_MINI)
    bad = [[], "Hi", [{"role": "king"}], say("x")[:0], [{"role": "tool", "content": "x"}], [{"role": "user"}]]

    async def work() -> None:
        async with started(settings()) as client:
            for messages in bad:
                with pytest.raises(RequestError) as expected:
                    encode_chat(tokenizer, messages)
                error = await error_of(client.encode_chat(messages))
                assert (type(error), str(error)) == (type(expected.value), str(expected.value))
                assert (error.param, error.code) == (expected.value.param, expected.value.code)
            error = await error_of(client.encode_chat(HI, template_kwargs={"mood": 1}))
            assert error.param == "chat_template_kwargs"
            assert (await error_of(client.encode_bad_words([" "]))).param == "bad_words"
            assert (await error_of(client.decode([-1]))).param == "tokens"
            assert (await error_of(client.decode([2**32]))).param == "tokens"

    run(work())


def test_what_cannot_be_sent_is_refused_and_the_process_lives():
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}

    async def work() -> None:
        async with started(settings()) as client:
            child = client.process_id
            assert "U+D83D at character 3" in str(await error_of(client.encode("abc\ud83d")))
            error = await error_of(client.encode_chat(say("abc\ud83d")))
            assert "U+D83D" in str(error)
            assert error.param == "messages"
            for extra in (2**70, deep, object()):
                assert "too large" in str(await error_of(client.encode_chat([{**HI[0], "extra": extra}])))
            assert "too large" in str(await error_of(client.encode_chat([{**HI[0], "extra": "x" * 65 * 2**20}])))
            assert await client.encode_chat(HI)
            assert client.process_id == child

    run(work())


def test_a_text_beyond_the_context_is_refused_before_it_is_tokenized(tmp_path: Path):
    doubled = with_template(tmp_path, "{{ messages[0].content }}" + "{{ 'a' * 40000 }}", max_model_len=2048)

    async def work() -> None:
        async with started(doubled) as client:
            error = await error_of(client.encode("a" * 30_721))
            assert isinstance(error, ContextTooLong)
            assert "30721 characters" in str(error)
            error = await error_of(client.encode_chat(say("Go")))
            assert isinstance(error, ContextTooLong)
            assert error.param == "messages"
            error = await error_of(client.encode_chat(say("a" * 10**6)))
            assert isinstance(error, ContextTooLong)
            assert await client.encode("a" * 3000)

    run(work())


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS, "Rendering the messages took longer than 1 s"),
        ("{{ 'a' * (messages | length * 10**9) }}", "too much memory"),
        ("{{ '%1000000000d' % messages | length }}", "too much memory"),
        ("{{ '' | center(messages | length * 10**9) }}", "too much memory"),
        (
            "{% set ns = namespace(x='a' * 1000) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "memory|longer than 1 s",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on these messages"),
        ("{{ raise_exception('Not like this.') }}", "Not like this."),
        ("{{ raise_exception('\\ud800') }}", r"messages: \?"),
        ("{{ '\\ud800' }}", "U\\+D800"),
    ],
)
def test_a_template_that_runs_wild_costs_one_request(template: str, words: str, tmp_path: Path):
    async def work() -> None:
        async with started(with_template(tmp_path, template, template_timeout_s=1)) as client:
            child = client.process_id
            behind = asyncio.gather(*(client.encode_chat(say(f"{i}")) for i in range(3)))
            with pytest.raises(RequestError, match=words):
                await client.encode_chat(say("Go"))
            assert await behind == [await client.encode(f"{i}", False) for i in range(3)]
            assert client.process_id == child

    run(work())


@pytest.mark.parametrize(
    ("template", "words"),
    [("{{ 'a' * 10**9 }}", "memory"), ("{{ '' | center(10**9) }}", "memory"), ("{{ 7 ** 90000000 }}", "longer than")],
)
def test_a_template_that_runs_wild_where_it_is_read_does_so_within_the_limits(
    template: str, words: str, tmp_path: Path
):
    for path in HEX_MINI.glob("*token*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)

    async def work() -> None:
        async with started(settings(tokenizer_folder=str(tmp_path), template_timeout_s=1)) as client:
            assert words in str(await error_of(client.encode_chat(HI)))
            assert await client.encode("a")

    run(work())


def test_the_event_loop_goes_on_while_a_job_takes_long(tmp_path: Path):
    async def work() -> None:
        async with started(with_template(tmp_path, ENDLESS)) as client:

            async def job() -> None:
                start = time.perf_counter()
                with pytest.raises(RequestError, match="longer than 2 s"):
                    await client.encode_chat(say("Go"))
                assert 1.9 < time.perf_counter() - start < 6

            waited, worked = await longest_pauses(job())
            assert waited < 1
            assert worked < 0.15  # tokenizing takes seconds

    run(work())


def test_a_word_of_a_megabyte_is_tokenized_without_the_event_loop_standing_still():
    word = "ab" * 500_000

    async def work() -> None:
        async with started(settings(max_model_len=2**20)) as client:

            async def job() -> None:
                tokens, other = await asyncio.gather(client.encode(word), client.encode("so"))
                assert len(tokens) > 100_000
                assert other

            waited, worked = await longest_pauses(job())
            assert waited < 1
            assert worked < 0.15  # tokenizing takes seconds

    run(work())


def test_a_process_that_is_stuck_is_killed_and_those_who_waited_are_served(tmp_path: Path):
    # Comparing equal strings takes long, and sort does so without once looking for signals.
    endless_sort = (
        "{% set n = messages | length * 10000000 %}"
        "{% set x = (['a' * n, 'a' * n] * 9999) | sort(case_sensitive=true) %}"
    )
    stuck = with_template(tmp_path, endless_sort, template_timeout_s=0.5, encode_timeout_s=1.0)

    async def work() -> None:
        async with started(stuck, stuck_after_s=0.5) as client:
            child = client.process_id
            jobs = [client.encode_chat(say("Go" if i == 2 else f"{i}")) for i in range(40)]
            answers = await asyncio.gather(*jobs, return_exceptions=True)
            assert [i for i, answer in enumerate(answers) if isinstance(answer, Exception)] == [2]
            assert isinstance(answers[2], RequestError)
            assert "took longer than 2 s" in str(answers[2])
            assert answers[39] == await client.encode("39", False)
            assert client.process_id != child
            assert not is_alive(child)

    run(work())


def test_a_process_that_is_killed_loses_no_job_and_answers_none_twice(tmp_path: Path):
    loop = "{% for i in range(60000) %}{% set x = i %}{% endfor %}Go"
    slow = with_template(tmp_path, loop, template_timeout_s=20)

    async def work() -> None:
        async with started(slow) as client:
            children = [client.process_id]
            expected = await client.encode("Go", False)
            tasks = [asyncio.create_task(client.encode_chat(say("Go"))) for _ in range(50)]
            for num_done in (10, 30):
                while sum(task.done() for task in tasks) < num_done:
                    await asyncio.sleep(0.001)
                os.kill(children[-1], signal.SIGKILL)
                while client.process_id in (None, children[-1]):
                    await asyncio.sleep(0.001)
                children.append(client.process_id)
            assert await asyncio.gather(*tasks) == [expected] * 50
            assert len(set(children)) == 3
            assert not any(is_alive(child) for child in children[:2])
        assert not is_alive(children[2])

    run(work())


def test_a_job_that_ends_its_process_twice_is_given_up(tmp_path: Path):
    async def work() -> None:
        async with started(with_template(tmp_path, ENDLESS, template_timeout_s=20)) as client:
            bad = asyncio.create_task(client.encode_chat(say("Go")))
            good = asyncio.create_task(client.encode("a"))
            for _ in range(2):
                await asyncio.sleep(0.2)
                child = client.process_id
                os.kill(child, signal.SIGKILL)
                while client.process_id in (None, child):
                    await asyncio.sleep(0.001)
            assert "twice" in str(await error_of(bad))
            assert await good == await client.encode("a")

    run(work())


def test_a_process_that_does_not_come_back_is_told_to_those_who_wait(tmp_path: Path):
    copied = tmp_path / "tokenizer"
    copied.mkdir()
    for path in HEX_MINI.glob("*token*.json"):
        (copied / path.name).write_bytes(path.read_bytes())

    async def work() -> None:
        async with started(settings(tokenizer_folder=str(copied))) as client:
            saved = (copied / "tokenizer.json").read_bytes()
            (copied / "tokenizer.json").unlink()
            os.kill(client.process_id, signal.SIGKILL)
            error = await error_of(client.encode("a"))
            assert isinstance(error, ServerError)
            assert "cannot be started" in str(error)
            (copied / "tokenizer.json").write_bytes(saved)
            assert await client.encode("a")

    run(work())


def test_cancelling_leaves_nothing_behind(tmp_path: Path):
    async def work() -> None:
        async with started(with_template(tmp_path, ENDLESS, template_timeout_s=0.2)) as client:
            tasks = [asyncio.create_task(client.encode_chat(say("Go"))) for _ in range(100)]
            await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in done)
            assert not client._waiting
            assert len(client._sent) <= 16
            assert await client.encode("a")
            assert not client._sent
            assert client._alarm is None

    run(work())


def test_closing_tells_those_who_wait_and_leaves_no_process(tmp_path: Path):
    async def work() -> None:
        async with started(with_template(tmp_path, ENDLESS)) as client:
            child = client.process_id
            tasks = [asyncio.create_task(client.encode_chat(say("Go"))) for _ in range(30)]
            await asyncio.sleep(0.05)
            start = time.perf_counter()
            await client.close()
            assert time.perf_counter() - start < 1
            assert not is_alive(child)
            for task in tasks:
                assert isinstance(await error_of(task), Unavailable)
            assert isinstance(await error_of(client.encode("a")), Unavailable)
            await client.close()

    run(work())


def test_a_tokenizer_that_cannot_be_loaded_is_an_error_of_the_start(tmp_path: Path):
    (tmp_path / "broken.jinja").write_text("{% if %}")
    missing = tmp_path / "missing.jinja"

    async def work() -> None:
        assert isinstance(await error_of(TextClient.start(settings(tokenizer_folder=str(tmp_path)))), CheckpointError)
        error = await error_of(TextClient.start(settings(chat_template=str(tmp_path / "broken.jinja"))))
        assert isinstance(error, ConfigError)
        assert "broken.jinja: The chat template is not valid: line 1" in str(error)
        error = await error_of(TextClient.start(settings(chat_template=str(missing))))
        assert "missing.jinja cannot be read" in str(error)

    run(work())


def test_a_model_without_a_template_still_completes(tmp_path: Path):
    for path in HEX_MINI.glob("*token*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())

    async def work() -> None:
        async with started(settings(tokenizer_folder=str(tmp_path))) as client:
            assert isinstance(await error_of(client.encode_chat(HI)), ChatTemplateMissing)
            assert await client.encode("a")

    run(work())


def test_the_keys_of_the_server_are_not_in_the_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEXLLM_API_KEYS", "secret-one")
    monkeypatch.setenv("HF_TOKEN", "secret-two")

    async def work() -> None:
        async with started(settings()) as client:
            environment = Path(f"/proc/{client.process_id}/environ").read_bytes()
            assert b"PATH=" in environment
            assert b"secret" not in environment

    run(work())


def test_the_process_ends_with_the_server_and_not_by_its_signals():
    program = (
        "import asyncio, sys, time\n"
        "from hex_llm.text.client import TextClient\n"
        "from hex_llm.text.wire import TextSettings\n"
        "async def main():\n"
        f"    client = await TextClient.start(TextSettings(tokenizer_folder={str(HEX_MINI)!r}, max_model_len=99))\n"
        "    print(client.process_id, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        child = int(server.stdout.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(child, number)
        time.sleep(0.2)
        assert is_alive(child)
        server.kill()
    deadline = time.monotonic() + 5
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x01\x90",
        encode(wire.Ready(7)),
        encode(wire.Encode(1, ["a"], True)),
        encode(settings()) + encode(settings()),
    ],
)
def test_what_is_no_message_ends_the_process(sent: bytes):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        command = [sys.executable, "-m", "hex_llm.text.process", str(theirs.fileno())]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True) as process:
            theirs.close()
            ours.sendall(sent)
            answers = list(read_frames(ours, Decoder(wire.FromText)))
            assert process.wait(10) == 1
            assert all(isinstance(answer, wire.Ready) for answer in answers)
            assert "The text process ends" in process.stderr.read()
