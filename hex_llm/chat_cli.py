"""`hex-llm chat`: a conversation with a model in the terminal."""

import sys
from collections.abc import Sequence

from rich.console import Console

from hex_llm.config import config_parser, parse_config
from hex_llm.engine.request import SamplingParams
from hex_llm.errors import RequestError
from hex_llm.llm import LLM

HELP = "Type a message and press Enter. /clear forgets the conversation, /exit (or Ctrl-D) leaves."


def main(argv: Sequence[str]) -> int | None:
    parser = config_parser("hex-llm chat", "Talk to a model in the terminal, or ask it one question with --message.")
    chat = parser.add_argument_group("Chat")
    chat.add_argument("--message", help="Ask this, print the answer and leave.")
    chat.add_argument("--system", help="What the model is told before the conversation.")
    chat.add_argument("--temperature", type=float, help="0 always takes the likeliest token.")
    chat.add_argument("--top_p", type=float)
    chat.add_argument("--top_k", type=int)
    chat.add_argument("--max_tokens", type=int, help="Most tokens of an answer.")
    # One person talks, and wants the first answer soon: nothing is compiled that this one sequence does not need.
    config, arguments = parse_config(parser, argv, max_decode_seqs=1, warmup=False)
    llm = LLM(config=config)
    chosen = {
        name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(arguments, name)) is not None
    }
    sampling = llm.default_sampling(max_tokens=arguments.max_tokens, **chosen)
    start = [{"role": "system", "content": arguments.system}] if arguments.system else []
    if arguments.message is not None:
        _answer(llm, [*start, {"role": "user", "content": arguments.message}], sampling)
        return None
    return _converse(llm, start, sampling)


def _converse(llm: LLM, start: list[dict[str, str]], sampling: SamplingParams) -> int | None:
    console = Console(stderr=True, highlight=False)
    console.print(HELP, style="dim")
    messages = list(start)
    while True:
        try:
            console.print("[bold]> [/bold]", end="")
            text = input().strip()
        except EOFError:
            console.print()
            return None
        if text == "/exit":
            return None
        if text == "/clear":
            messages = list(start)
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": _answer(llm, messages, sampling)})
            except RequestError as error:  # such as a conversation that has outgrown the context
                messages.pop()
                console.print(f"{error} /clear starts afresh.", style="red")
            except KeyboardInterrupt:  # the answer, not the conversation, is broken off
                messages.pop()
                console.print()


def _answer(llm: LLM, messages: list[dict[str, str]], sampling: SamplingParams) -> str:
    answer = ""
    for piece in llm.stream_chat(messages, sampling):
        sys.stdout.write(piece)
        sys.stdout.flush()
        answer += piece
    sys.stdout.write("\n")
    return answer
