"""`hex-llm chat`: a conversation with a model in the terminal."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from rich.console import Console

from hex_llm.config import config_parser, parse_config
from hex_llm.engine.request import FinishReason, SamplingParams
from hex_llm.errors import ConfigError, NumericalError, RequestError
from hex_llm.llm import LLM

HELP = (
    "Type a message and press Enter. Ctrl-C breaks an answer off, /clear forgets the conversation, "
    "/exit (or Ctrl-D) leaves."
)


def main(argv: Sequence[str]) -> int | None:
    # One person talks, and wants the first answer soon: nothing is compiled that this one sequence does not need.
    description = "Talk to a model in the terminal, or ask it one question with --message."
    parser = config_parser("hex-llm chat", description, max_decode_seqs=1, warmup=False)
    chat = parser.add_argument_group("Chat")
    chat.add_argument("--message", help="Ask this, print the answer and leave.")
    chat.add_argument("--system", help="What the model is told before the conversation.")
    chat.add_argument("--temperature", type=float, help="0 always takes the likeliest token.")
    chat.add_argument("--top_p", type=float, help="Likeliest tokens that make up this share.")
    chat.add_argument("--top_k", type=int, help="This many likeliest tokens; 1 always takes the likeliest.")
    chat.add_argument(
        "--max_tokens", type=int, help="Most tokens of an answer. Without it, as many as the context has room for."
    )
    config, arguments = parse_config(parser, argv)
    names = ("temperature", "top_p", "top_k", "max_tokens")
    chosen = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    try:
        SamplingParams(**chosen)  # refused before the model is loaded
    except RequestError as error:
        raise ConfigError(f"--{error}") from None
    llm = LLM(config=config)
    sampling = llm.default_sampling(**chosen)
    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    if arguments.message is None:
        return _converse(llm, start, sampling)
    if _answer(llm, [*start, {"role": "user", "content": arguments.message}], sampling) is None:
        raise KeyboardInterrupt
    return None


def _converse(llm: LLM, start: list[dict[str, str]], sampling: SamplingParams) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(HELP, style="dim", soft_wrap=True)
    messages = list(start)
    while True:
        try:
            console.print("[bold]> [/bold]", end="")
            text = input().strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:  # there is no answer to break off: a new line, as in any shell
            console.print()
            continue
        if text == "/exit":
            return
        if text == "/clear":
            messages = list(start)
        elif text:
            question = {"role": "user", "content": text}
            try:
                answer = _answer(llm, [*messages, question], sampling)
            except RequestError as error:  # such as a conversation that has outgrown the context
                console.print(f"{error} /clear starts afresh.", style="red", markup=False, soft_wrap=True)
            except NumericalError as error:
                console.print(str(error), style="red", markup=False, soft_wrap=True)
            else:
                if answer is not None:
                    messages += [question, {"role": "assistant", "content": answer}]


def _answer(llm: LLM, messages: list[dict[str, str]], sampling: SamplingParams) -> str | None:
    """Prints the answer as it comes, and returns it; None where it was broken off."""
    answer, finished, reason = "", False, None
    with _interruptible() as interrupted, closing(llm.stream_chat(messages, sampling)) as pieces:
        try:
            while not interrupted():
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    finished, reason = True, end.value
                    break
                sys.stdout.write(piece)
                sys.stdout.flush()
                answer += piece
        finally:
            if answer or finished:
                sys.stdout.write("\n")
    if reason == FinishReason.LENGTH:
        sys.stderr.write("[The answer ends here because of --max_tokens or the end of the context.]\n")
    return answer if finished else None


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Meanwhile Ctrl-C is a flag to ask for, so that it never strikes in the middle of a step, which would be the end
    of the engine. The second Ctrl-C does what it always does, for answers of which nothing is seen.
    """
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)
