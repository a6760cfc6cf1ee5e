"""The conversation in the terminal: what it remembers, what it prints where, and how it is broken off."""

import io
import signal
import sys

import pytest

from hex_llm import LLM, chat_cli, cli
from hex_llm.errors import NumericalError
from tests.checkpoints import write_llama
from tests.runner.engines import SMALL

ARGUMENTS = ["--temperature=0", "--max_tokens=4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder):
    return LLM(str(folder), **SMALL)


class Recorder:
    """A model that keeps what it is asked."""

    def __init__(self, llm: LLM):
        self.asked: list[list[tuple[str, str]]] = []
        self.default_sampling = llm.default_sampling
        self.engine = llm.engine
        self._llm = llm

    def stream_chat(self, messages, sampling):
        self.asked.append([(message["role"], message["content"]) for message in messages])
        return self._llm.stream_chat(messages, sampling)


@pytest.fixture
def llm(loaded, monkeypatch):
    recorder = Recorder(loaded)
    monkeypatch.setattr(chat_cli, "LLM", lambda config: recorder)
    # A shell that runs the tests in the background has SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield recorder
    assert not loaded.engine.has_work
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.fixture
def chat(monkeypatch, capsys):
    """Runs `hex-llm chat` with lines typed; returns its exit code and what it printed."""

    def run(*lines, arguments=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = cli.main(["chat", *ARGUMENTS, *arguments])
        return code, *capsys.readouterr()

    return run


def answer_to(llm, *messages, max_tokens=4):
    conversation = [{"role": role, "content": content} for role, content in messages]
    return "".join(llm._llm.stream_chat(conversation, llm.default_sampling(temperature=0, max_tokens=max_tokens)))


def test_each_question_is_asked_with_all_that_was_said_before(llm, chat):
    code, out, err = chat("one", "two", arguments=["--system=Be brief."])
    start = [("system", "Be brief."), ("user", "one")]
    first = answer_to(llm, *start)
    second = [*start, ("assistant", first), ("user", "two")]
    assert llm.asked == [start, second]
    assert out == f"{first}\n{answer_to(llm, *second)}\n"
    assert chat_cli.HELP in err
    assert code == 0


def test_clear_forgets_the_conversation_but_not_what_the_model_was_told_before(llm, chat):
    chat("one", "/clear", "two", arguments=["--system=Be brief."])
    assert llm.asked[1] == [("system", "Be brief."), ("user", "two")]


def test_exit_leaves_and_empty_lines_are_no_questions(llm, chat):
    code, out, _ = chat("", "   ", "/exit", "never asked")
    assert (code, out, llm.asked) == (0, "", [])


def test_the_end_of_the_input_leaves(llm, chat):
    code, out, err = chat()
    assert (code, out, llm.asked) == (0, "", [])
    assert err.endswith("> \n")


def test_a_conversation_that_outgrows_the_context_says_so_and_goes_on(llm, chat):
    code, out, err = chat("one", "x" * 200, "two", "/clear", "three")
    first, second, third, fourth = llm.asked
    assert second[-1] == ("user", "x" * 200)
    assert third == [*first, ("assistant", answer_to(llm, *first)), ("user", "two")]
    assert fourth == [("user", "three")]
    (line,) = (line for line in err.splitlines() if "the context is" in line)
    assert "the context is 96 tokens" in line
    assert line.endswith("/clear starts afresh.")
    assert out == "".join(f"{answer_to(llm, *asked)}\n" for asked in (first, third, fourth))
    assert code == 0


def test_a_message_is_answered_on_stdout_and_nothing_else_is(folder, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", None)
    flags = [f"--{name}={value}" for name, value in SMALL.items() if name not in ("warmup", "compilation_cache_dir")]
    arguments = ["chat", str(folder), "--message=hi", *ARGUMENTS, *flags]
    assert cli.main([*arguments, f"--compilation_cache_dir={SMALL['compilation_cache_dir']}"]) == 0
    llm = LLM(str(folder), **SMALL)
    sampling = llm.default_sampling(temperature=0, max_tokens=4)
    assert capfd.readouterr().out == "".join(llm.stream_chat([{"role": "user", "content": "hi"}], sampling)) + "\n"


def test_ctrl_c_breaks_the_answer_off_between_steps_and_the_conversation_goes_on(llm, chat, monkeypatch):
    engine = llm.engine
    dispatch, dispatched = engine._runner.dispatch, []

    def interrupted(step):
        dispatched.append(step)
        if len(dispatched) == 4:
            signal.raise_signal(signal.SIGINT)
        return dispatch(step)

    monkeypatch.setattr(engine._runner, "dispatch", interrupted)
    code, out, _ = chat("one", "two", arguments=["--max_tokens=40"])
    whole = answer_to(llm, ("user", "one"), max_tokens=40)
    broken_off, second = out[: out.index("\n")], out[out.index("\n") + 1 :]
    assert whole.startswith(broken_off)
    assert 0 < len(broken_off) < len(whole)
    assert llm.asked == [[("user", "one")], [("user", "two")]]
    assert second == answer_to(llm, ("user", "two"), max_tokens=40) + "\n"
    assert code == 0
    assert not engine.is_dead


def stub(monkeypatch, llm, *pieces):
    """Has the model answer with pieces of text; an exception among them is raised, a call made."""

    def stream_chat(messages, sampling):
        for piece in pieces:
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, str):
                yield piece
            else:
                piece()

    monkeypatch.setattr(llm, "stream_chat", stream_chat)


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_during_the_answer_to_a_message_exits_with_130(llm, chat, monkeypatch):
    stub(monkeypatch, llm, "some", press_ctrl_c, " text", " never seen")
    assert chat(arguments=["--message=hi"]) == (130, "some text\n", "")


def test_ctrl_c_twice_leaves_where_no_text_comes(llm, chat, monkeypatch):
    stub(monkeypatch, llm, "some", press_ctrl_c, press_ctrl_c, " text")
    code, out, _ = chat("one", "two")
    assert (code, out) == (130, "some\n")


def test_a_model_that_breaks_down_is_one_line_and_the_conversation_goes_on(llm, chat, monkeypatch):
    stub(monkeypatch, llm, "some", NumericalError("No [usable] number, " + 30 * "really "))
    code, out, err = chat("one", "two")
    assert (code, out) == (0, "some\nsome\n")
    assert err.count("No [usable] number, " + 30 * "really ") == 2


def test_a_model_that_breaks_down_on_a_message_exits_with_1(llm, chat, monkeypatch):
    stub(monkeypatch, llm, "some", NumericalError("No usable number."))
    assert chat(arguments=["--message=hi"]) == (1, "some\n", "hex-llm: No usable number.\n")


def test_an_answer_that_was_cut_off_is_said_to_be(llm, chat):
    code, out, error = chat(arguments=["--message=hi", "--max_tokens=3"])
    assert code == 0
    assert "The answer ends here because of --max_tokens" in error
    assert "ends here" not in out
