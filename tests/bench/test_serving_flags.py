"""The command line of the benchmark: what vLLM's users type, and what is refused."""

import pytest

from hex_llm.bench.backends import BACKENDS
from hex_llm.bench.serving_flags import Options, parse_settings
from hex_llm.errors import ConfigError
from hex_llm.flags import flags_of


def test_the_defaults_are_our_server_and_vllms_load():
    settings = parse_settings([])
    options = settings.options
    assert (settings.base_url, settings.endpoint) == ("http://127.0.0.1:7080", "/v1/completions")
    assert (options.num_prompts, options.request_rate, options.burstiness) == (1000, float("inf"), 1.0)
    assert (options.random_input_len, options.random_output_len, options.random_range_ratio) == (1024, 128, 0.0)
    assert settings.concurrencies == (None,)
    assert (settings.latencies, settings.percentiles) == (("ttft", "tpot", "itl"), (99.0,))
    assert options.sampling == {"temperature": 0.0}


def parse(line: str, *words: str):
    """The settings of a line's words, and of those that may hold spaces."""
    return parse_settings([*line.split(), *words])


def test_a_command_line_of_vllms_guide_is_read():
    options = parse(
        "--backend vllm --model meta-llama/Llama-3.3-70B-Instruct --dataset-name random --ignore-eos --num-prompts 3000"
        " --random-input-len=1000 --random-output-len=1000 --max-concurrency=128 --seed 100"
    ).options
    assert (options.backend, options.model) == ("vllm", "meta-llama/Llama-3.3-70B-Instruct")
    assert (options.num_prompts, options.random_input_len, options.random_output_len) == (3000, 1000, 1000)
    assert (options.max_concurrency, options.seed, options.ignore_eos) == ("128", 100, True)


def test_dashes_and_underscores_are_the_same():
    assert parse_settings(["--num-prompts", "7"]) == parse_settings(["--num_prompts=7"])


def test_every_backend_can_be_named():
    (backend,) = (each for each in flags_of(Options) if each.name == "backend")
    assert set(backend.choices) == set(BACKENDS)


@pytest.mark.parametrize(
    ("argv", "address"),
    [
        (["--host", "10.0.0.1", "--port", "8000"], ("http://10.0.0.1:8000", "/v1/completions")),
        (["--host", "::1"], ("http://[::1]:7080", "/v1/completions")),
        (["--base-url", "https://host/base/"], ("https://host/base", "/v1/completions")),
        (["--base-url", "http://host:8000/v1"], ("http://host:8000", "/v1/completions")),
        (["--base-url", "http://host/v1", "--endpoint", "/completions"], ("http://host/v1", "/completions")),
        (["--backend", "openai-chat"], ("http://127.0.0.1:7080", "/v1/chat/completions")),
        (["--backend", "hex-llm"], ("http://127.0.0.1:7080", "/generate")),
    ],
)
def test_the_address_comes_from_the_flags(argv, address):
    settings = parse_settings(argv)
    assert (settings.base_url, settings.endpoint) == address


def test_lists_are_read():
    settings = parse(
        "--max-concurrency 1,8,32 --percentile-metrics e2el,ttft --metric-percentiles 50,99.9 --temperature 0.7"
        " --goodput ttft:500 tpot:50 --header X-Team=red X-Eq=a=b --header X-More=1 --top-k 5",
        "--extra-body",
        '{"min_tokens": 3}',
    )
    assert settings.concurrencies == (1, 8, 32)
    assert settings.latencies == ("ttft", "e2el")
    assert settings.percentiles == (50.0, 99.9)
    assert settings.goals_ms == {"ttft": 500.0, "tpot": 50.0}
    assert settings.headers == {"X-Team": "red", "X-Eq": "a=b", "X-More": "1"}
    assert settings.extra_body == {"min_tokens": 3}
    assert settings.options.sampling == {"temperature": 0.7, "top_k": 5}


def test_answers_in_one_piece_have_one_latency():
    assert parse_settings(["--backend", "vertex"]).latencies == ("e2el",)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num-promts 5", "There is no flag --num-promts; did you mean --num_prompts?"),
        ("--xyzzy", "There is no flag --xyzzy; --help lists those there are."),
        ("serve", "'serve' belongs to no flag."),
        ("--num-prompts 0", "--num_prompts=0 must be at least 1."),
        ("--num-prompts many", "--num_prompts=many must be an integer."),
        ("--backend tgi", "--backend=tgi is not one of openai, vllm,"),
        ("--port 70000", "--port=70000 must be at most 65535."),
        ("--base-url localhost:7080", "localhost:7080 is not the address of a server,"),
        ("--base-url http://host:99999", "http://host:99999 is not the address of a server,"),
        ("--base-url http://me:secret@host", "http://me:secret@host is not the address of a server,"),
        ("--base-url http://", "http: is not the address of a server,"),
        ("--base-url http://host?a=b", "http://host?a=b is not the address of a server,"),
        ("--base-url http://host --port 1", "--base_url=http://host says where the server is; leave out"),
        ("--endpoint v1/completions", "--endpoint=v1/completions must be a path that starts with a slash."),
        ("--request-rate 0", "--request_rate=0.0 must be above 0."),
        ("--request-rate nan", "--request_rate=nan must be above 0."),
        ("--burstiness -1", "--burstiness=-1.0 must be above 0."),
        ("--random-range-ratio 1", "--random_range_ratio=1.0 must be below 1."),
        ("--random-range-ratio nan", "--random_range_ratio=nan must be at least 0."),
        ("--max-concurrency 0", "--max_concurrency=0 must be an integer from 1 to"),
        ("--max-concurrency 1,,2", "--max_concurrency=1,,2 must be an integer from 1 to"),
        ("--max-concurrency 1,x", "--max_concurrency=1,x must be an integer from 1 to"),
        ("--percentile-metrics ttft,xyz", "--percentile_metrics=ttft,xyz: 'xyz' is not one of ttft, tpot, itl, e2el."),
        ("--backend vertex --percentile-metrics ttft", "--percentile_metrics=ttft: ttft is not known where answers"),
        ("--metric-percentiles 101", "--metric_percentiles=101 must be numbers from 0 to 100"),
        ("--metric-percentiles a", "--metric_percentiles=a must be numbers from 0 to 100"),
        ("--goodput itl:5", "--goodput=itl:5: 'itl' is not one of ttft, tpot, e2el."),
        ("--goodput ttft", "--goodput=ttft must be a name and milliseconds"),
        ("--goodput ttft:-5", "--goodput=ttft:-5 must be a name and milliseconds"),
        ("--backend vertex --goodput ttft:5", "--goodput=ttft:5: ttft is not known where answers come in one piece"),
        ("--goodput", "--goodput: expected at least one argument."),
        ("--header X", "--header='X' must be a name and a value"),
        ("--header =X", "--header='=X' must be a name and a value"),
        ("--extra-body [1]", "--extra_body=[1] is not a JSON object."),
        ("--extra-body {", "--extra_body={ is not a JSON object."),
        ("--dataset-name sharegpt", "--dataset_name=sharegpt needs --dataset_path, the file to read."),
        ("--dataset-path x", "--dataset_path=x is of no use with --dataset_name=random."),
        ("--sonnet-prefix-len 600", "--sonnet_prefix_len=600 is a part of --sonnet_input_len=550 and cannot be more."),
        ("--save-detailed", "--save_detailed needs --save_result."),
        ("--timeout inf", "--timeout=inf must be finite."),
    ],
)
def test_a_bad_command_line_is_refused(argv, message):
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert str(caught.value).startswith(message)


def test_a_header_with_a_line_break_is_refused():
    with pytest.raises(ConfigError):
        parse_settings(["--header", "X-A=b\r\nX-C: d"])
