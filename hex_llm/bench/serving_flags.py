"""The flags of `hex-llm bench serve`, by the names that vLLM's benchmark gave them."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from hex_llm.bench.backends import BACKENDS, Backend
from hex_llm.bench.metrics import LATENCIES
from hex_llm.errors import ConfigError
from hex_llm.flags import FlagParser, flag, flags_of

HOST, PORT = "127.0.0.1", 7080
SUMMARY = "Measure a server under load."

_ONE_WORD = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Options:
    """The flags that take one value or none."""

    backend: Literal["openai", "vllm", "openai-chat", "generate", "hex-llm", "generate-stream", "vertex"] = flag(
        "Server",
        "openai",
        "The API to use: openai and vllm are /v1/completions, openai-chat is /v1/chat/completions, generate and hex-llm"
        " are /generate with streaming_tokens, generate-stream is /generate with stream, vertex is /generate with"
        " instances, not streamed.",
        aliases=("endpoint_type",),
    )
    base_url: str | None = flag("Server", None, "Where the server is, such as http://127.0.0.1:7080; https too.")
    host: str = flag("Server", HOST, "The server's machine, unless there is a base_url.")
    port: int = flag("Server", PORT, "The server's port, unless there is a base_url.", at_most=65535)
    endpoint: str | None = flag("Server", None, "The route; that of the backend, unless given.")
    model: str | None = flag("Server", None, "The model; the first that /v1/models lists, unless given.")
    served_model_name: str | None = flag("Server", None, "The name to send, where it is not that of model.")
    lora_modules: str | None = flag(
        "Server", None, "Adapters of the server's, with commas between, which requests name in turn for the model."
    )
    tokenizer: str | None = flag(
        "Server",
        None,
        "A folder with the model's tokenizer. Unless given, that of the model if it is in a folder here or the one"
        " that comes with hex-llm. Without one, random prompts are sent as token ids, and the server counts tokens.",
    )
    timeout: float = flag("Server", 3600.0, "Seconds that one request may take.", above=0)

    dataset_name: Literal["random", "sharegpt", "sonnet", "custom"] = flag(
        "Prompts", "random", "Where prompts come from."
    )
    dataset_path: str | None = flag(
        "Prompts", None, "The file of sharegpt (JSON), sonnet (text) or custom (JSONL with prompt and output_tokens)."
    )
    num_prompts: int = flag("Prompts", 1000, "Requests to send, for each of max_concurrency.")
    num_warmups: int = flag("Prompts", 1, "Requests to send before, which are not measured.", at_least=0)
    seed: int = flag("Prompts", 0, "Of prompts and arrival times.", at_least=0)
    random_input_len: int = flag("Prompts", 1024, "Tokens of random prompts, special ones included.")
    random_output_len: int = flag("Prompts", 128, "Tokens of the answers to random prompts.")
    random_range_ratio: float = flag(
        "Prompts", 0.0, "Lengths are drawn from length * (1 - ratio) to length * (1 + ratio).", at_least=0
    )
    random_prefix_len: int = flag(
        "Prompts", 0, "Tokens that all random prompts start with, beside random_input_len.", at_least=0
    )
    sharegpt_output_len: int | None = flag("Prompts", None, "Tokens of the answers, instead of ShareGPT's own.")
    sonnet_input_len: int = flag("Prompts", 550, "Tokens of sonnet prompts, at most.")
    sonnet_output_len: int = flag("Prompts", 150, "Tokens of the answers to sonnet prompts.")
    sonnet_prefix_len: int = flag("Prompts", 200, "Tokens that all sonnet prompts start with, at most.", at_least=0)
    custom_output_len: int = flag("Prompts", 256, "Tokens of the answers, where a custom prompt has no output_tokens.")

    request_rate: float = flag("Load", math.inf, "Requests per second; inf sends them all at once.", above=0)
    burstiness: float = flag(
        "Load", 1.0, "How even a request_rate is: 1 is a Poisson process, less is bursts, inf is a clock.", above=0
    )
    max_concurrency: str | None = flag(
        "Load", None, "The most requests under way at once; for a list such as 1,8,32 a run each, with other prompts."
    )

    ignore_eos: bool = flag("Sampling", False, "Let answers go on to their full length.")
    temperature: float = flag("Sampling", 0.0, "0 is greedy.", at_least=0)
    top_p: float | None = flag("Sampling", None, "Sent if given.", above=0, at_most=1)
    top_k: int | None = flag("Sampling", None, "Sent if given.", at_least=-1)
    min_p: float | None = flag("Sampling", None, "Sent if given.", at_least=0, at_most=1)
    frequency_penalty: float | None = flag("Sampling", None, "Sent if given.", at_least=-2, at_most=2)
    presence_penalty: float | None = flag("Sampling", None, "Sent if given.", at_least=-2, at_most=2)
    repetition_penalty: float | None = flag("Sampling", None, "Sent if given.", above=0)
    extra_body: str | None = flag("Sampling", None, "A JSON object with more fields to send, which replace others.")

    percentile_metrics: str | None = flag(
        "Result",
        None,
        "The latencies to report, of ttft,tpot,itl,e2el; the first three unless given, e2el for answers in one piece.",
    )
    metric_percentiles: str = flag("Result", "99", "The percentiles to report of them, such as 50,99.")
    save_result: bool = flag("Result", False, "Write the result as JSON.")
    save_detailed: bool = flag("Result", False, "Write what became of each request into it, too.")
    result_dir: str = flag("Result", ".", "The folder to write it to.")
    result_filename: str | None = flag("Result", None, "Its name; made of backend, load, model and time unless given.")
    plot: str | None = flag("Result", None, "A .png file to draw throughput against latency in.")
    disable_tqdm: bool = flag("Result", False, "Show no progress bar.")

    def __post_init__(self) -> None:
        for each in flags_of(Options):
            object.__setattr__(self, each.name, each.accept(getattr(self, each.name)))
        if not self.random_range_ratio < 1:
            raise ConfigError(f"--random_range_ratio={self.random_range_ratio} must be below 1.")
        for name in ("timeout", "temperature", "repetition_penalty"):
            if getattr(self, name) == math.inf:
                raise ConfigError(f"--{name}=inf must be finite.")
        if self.dataset_name != "random" and self.dataset_path is None:
            raise ConfigError(f"--dataset_name={self.dataset_name} needs --dataset_path, the file to read.")
        if self.dataset_name == "random" and self.dataset_path is not None:
            raise ConfigError(f"--dataset_path={self.dataset_path} is of no use with --dataset_name=random.")
        if self.sonnet_prefix_len > self.sonnet_input_len:
            raise ConfigError(
                f"--sonnet_prefix_len={self.sonnet_prefix_len} is a part of --sonnet_input_len={self.sonnet_input_len}"
                " and cannot be more."
            )
        if self.lora_modules and not self.api.names_model:
            raise ConfigError(f"--lora_modules needs a backend whose requests name a model; --backend={self.backend}.")
        if not all(self.adapters):
            raise ConfigError(f"--lora_modules={self.lora_modules} has an empty name.")
        if self.save_detailed and not self.save_result:
            raise ConfigError("--save_detailed needs --save_result.")

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(each.strip() for each in self.lora_modules.split(",")) if self.lora_modules else ()

    @property
    def api(self) -> Backend:
        return BACKENDS[self.backend]

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters to send."""
        optional = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
        given = {name: value for name in optional if (value := getattr(self, name)) is not None}
        return {"temperature": self.temperature, **given, **({"ignore_eos": True} if self.ignore_eos else {})}


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a command line says."""

    options: Options
    base_url: str
    endpoint: str
    concurrencies: tuple[int | None, ...]
    latencies: tuple[str, ...]
    percentiles: tuple[float, ...]
    goals_ms: Mapping[str, float]
    headers: Mapping[str, str]
    extra_body: Mapping[str, Any]


def parse_settings(argv: Sequence[str]) -> Settings:
    parser = FlagParser("hex-llm bench serve", SUMMARY, flags_of(Options))
    parser.usage = "%(prog)s [flags]"
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="Goals of ttft, tpot and e2el, such as ttft:500."
    )
    parser.add_argument(
        "--header",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="Headers to send; an API key is taken from OPENAI_API_KEY.",
    )
    arguments, words = parser.parse(argv, {})
    if words:
        raise ConfigError(f"{words[0]!r} belongs to no flag.")
    names = {field.name for field in dataclasses.fields(Options)}
    options = Options(**{name: value for name, value in vars(arguments).items() if name in names})
    base_url, endpoint = _server(options)
    return Settings(
        options=options,
        base_url=base_url,
        endpoint=endpoint,
        concurrencies=_concurrencies(options.max_concurrency),
        latencies=_latencies(options),
        percentiles=_percentiles(options.metric_percentiles),
        goals_ms=_goals(arguments.goodput, options.api),
        headers=_headers(arguments.header),
        extra_body=_extra_body(options.extra_body),
    )


def _server(options: Options) -> tuple[str, str]:
    if options.base_url is None:
        host = f"[{options.host}]" if ":" in options.host else options.host
        base_url = f"http://{host}:{options.port}"
    elif (options.host, options.port) != (HOST, PORT):
        raise ConfigError(f"--base_url={options.base_url} says where the server is; leave out --host and --port.")
    else:
        base_url = options.base_url.rstrip("/")
    if not _is_plain_url(base_url):
        raise ConfigError(f"{base_url} is not the address of a server, such as http://127.0.0.1:7080.")
    if options.endpoint is None:  # with the /v1 that OpenAI's own clients want
        return base_url.removesuffix("/v1"), options.api.endpoint
    if not options.endpoint.startswith("/") or not _ONE_WORD.fullmatch(options.endpoint):
        raise ConfigError(f"--endpoint={options.endpoint} must be a path that starts with a slash.")
    return base_url, options.endpoint


def _is_plain_url(url: str) -> bool:
    """Whether it has a host and perhaps a port and a path, and nothing else."""
    try:
        parts = urlsplit(url)
        found = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is none
        return False
    return found and "@" not in parts.netloc and not parts.query and bool(_ONE_WORD.fullmatch(url))


def _concurrencies(text: str | None) -> tuple[int | None, ...]:
    if text is None:
        return (None,)
    words = text.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= 2**20 for word in words):
        raise ConfigError(f"--max_concurrency={text} must be an integer from 1 to {2**20}, or a list such as 1,8,32.")
    return tuple(int(word) for word in words)


def _latencies(options: Options) -> tuple[str, ...]:
    text = options.percentile_metrics
    if text is None:
        return ("ttft", "tpot", "itl") if options.api.streams else ("e2el",)
    names = text.split(",")
    for name in names:
        if name not in LATENCIES:
            raise ConfigError(f"--percentile_metrics={text}: {name!r} is not one of {', '.join(LATENCIES)}.")
        _check_measured(name, options.api, f"--percentile_metrics={text}")
    return tuple(name for name in LATENCIES if name in names)


def _check_measured(name: str, backend: Backend, where: str) -> None:
    if name != "e2el" and not backend.streams:
        raise ConfigError(f"{where}: {name} is not known where answers come in one piece; use e2el.")


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"--metric_percentiles={text} must be numbers from 0 to 100, such as 50,99.")
    return tuple(values)


def _goals(words: Sequence[str], backend: Backend) -> dict[str, float]:
    goals: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput={word}: {name!r} is not one of ttft, tpot, e2el.")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = math.nan
        if not goals[name] > 0:
            raise ConfigError(f"--goodput={word} must be a name and milliseconds, such as ttft:500.")
        _check_measured(name, backend, f"--goodput={word}")
    return goals


def _headers(words: Sequence[str]) -> dict[str, str]:
    headers = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not word.isprintable() or not _ONE_WORD.fullmatch(name):
            raise ConfigError(f"--header={word!r} must be a name and a value, such as X-Team=red.")
        headers[name] = value
    return headers


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        body = json.loads(text or "{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ConfigError(f"--extra_body={text} is not a JSON object.")
    return body
