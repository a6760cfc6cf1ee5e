"""Config: its defaults, spellings, limits and contradictions, from a command line and from Python alike."""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from hex_llm.config import RETIRED, VLLM, Config, config_parser, flags_markdown, parse_config
from hex_llm.errors import ConfigError
from hex_llm.flags import flags_of

FLAGS = {flag.name: flag for flag in flags_of(Config)}

# As Google's page of Hex-LLM's arguments has them.
DOCUMENTED = {
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "trust_remote_code": False,
    "load_format": "auto",
    "max_model_len": None,
    "sliding_window": None,
    "seed": 0,
    "num_hosts": 1,
    "disagg_topo": None,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "worker_distributed_method": "mp",
    "enable_jit": True,
    "warmup": True,
    "prefill_seqs_padding": 8,
    "prefill_len_padding": 512,
    "max_decode_seqs": 256,
    "decode_seqs_padding": 8,
    "decode_blocks_padding": 128,
    "enable_prefix_cache_hbm": False,
    "enable_chunked_prefill": False,
    "hbm_utilization_factor": 0.9,
    "num_blocks": None,
    "block_size": 32,
    "enable_lora": False,
    "max_lora_rank": 16,
    "enable_lora_cache": True,
    "max_num_mem_cached_lora": 16,
    "host": "0.0.0.0",
    "port": 7080,
}


def parse(line: str) -> Config:
    return Config.from_args(line.split())


def refusal(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    return str(caught.value)


def another_value(name: str) -> Any:
    """A value of the flag that is allowed and not its default, were its part there."""
    flag = FLAGS[name]
    if flag.kind is bool:
        return not flag.default
    if flag.choices:
        return next(choice for choice in flag.choices if choice != flag.default)
    return {int: 640, float: 0.5, str: "something"}[flag.kind]


def test_defaults_are_the_documented_ones():
    config = dataclasses.asdict(Config())
    assert {name: config[name] for name in DOCUMENTED} == DOCUMENTED
    assert Config() == parse("")


def test_documented_choices_are_the_ones_accepted():
    assert {flag.name: flag.choices for flag in FLAGS.values() if flag.choices} == {
        "tokenizer_mode": ("auto", "slow"),
        "load_format": ("auto", "dummy"),
        "quantization": ("int8", "fp8", "int4", "w8a8", "w4a8"),
        "check_weights": ("sample", "full", "off"),
        "dtype": ("auto", "bfloat16", "float32"),
        "kv_transfer_path": ("auto", "device", "jax", "host"),
        "worker_distributed_method": ("mp", "ray"),
        "block_size": (8, 16, 32, 2048, 8192),
        "kv_cache_dtype": ("auto", "fp8", "int8"),
        "prefix_cache_isolation": ("auto", "none", "key", "salt"),
        "oom_policy": ("rebuild", "exit"),
    }


def test_one_prompt_is_prefilled_at_a_time_unless_prefill_is_chunked():
    assert Config().prefill_seqs == 1
    assert Config(enable_chunked_prefill=True).prefill_seqs == 16
    assert Config(enable_chunked_prefill=True, max_prefill_seqs=3).prefill_seqs == 3
    assert Config(max_prefill_seqs=3).prefill_seqs == 3


def spellings():
    for flag in FLAGS.values():
        for alias in (flag.name, *flag.aliases):
            for name in sorted({alias.replace("_", "-"), alias.replace("-", "_")}):
                if flag.kind is bool:
                    yield flag.name, f"--{name}", True
                    yield flag.name, f"--no-{name}", False
                else:
                    value = another_value(flag.name)
                    yield flag.name, f"--{name}={value}", value
                    yield flag.name, f"--{name} {value}", value


@pytest.mark.parametrize(("name", "line", "value"), [*spellings()], ids=lambda part: str(part))
def test_every_spelling_of_a_flag_sets_its_field(name, line, value):
    namespace, words = config_parser("hex-llm", "", server=True).parse(line.split(), RETIRED)
    assert vars(namespace) == {name: value}
    assert words == []


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("--max_decode_seqs=12", "--max_running_seqs=12"),
        ("--max_decode_seqs=12", "--max-num-seqs 12"),
        ("--max_num_batched_tokens=4096", "--max-num-batched-tokens 4096"),
        ("--gpu_memory_utilization=0.98", "--gpu-memory-utilization 0.98"),
        ("--enable_prefix_cache_hbm", "--enable-prefix-caching"),
        ("--no-enable_prefix_cache_hbm", "--no-enable-prefix-caching"),
        ("--enable_chunked_prefill", "--enable-chunked-prefill"),
        ("--async_scheduling", "--async-scheduling"),
        ("--no-async_scheduling", "--no-async-scheduling"),
        ("--num_blocks=99", "--num-gpu-blocks-override 99"),
        ("--max_model_len=2048", "--max-model-len 2048"),
        ("--block_size=16", "--block-size 16"),
        ("--load_format=dummy", "--load-format dummy"),
        ("--load_format=auto", "--load-format safetensors"),
        ("--dtype=float32", "--dtype float"),
        ("--tokenizer_mode=slow", "--tokenizer-mode slow"),
        ("--no-enable_jit", "--no-enable-jit"),
        ("--enable_lora --lora_modules=a=x,b=gs://c/d", "--enable-lora --lora-modules a=x,b=gs://c/d"),
        ("--max_num_mem_cached_lora=4", "--max-loras 4"),
        ("--model=folder", "folder"),
        ("--model=folder --seed=42", "--seed 42 folder"),
    ],
)
def test_hex_llm_and_vllm_spellings_agree(ours, other):
    assert parse(ours) == parse(other)


def test_a_synonym_of_a_value_is_the_value():
    assert Config(load_format="safetensors").load_format == "auto"
    assert Config(load_format="safetensors") == Config()
    assert refusal("--load_format=gguf") == "--load_format=gguf is not one of auto (or safetensors), dummy."
    for flag in FLAGS.values():
        assert {*flag.synonyms.values()} <= {*flag.choices}
        assert not {*flag.synonyms} & {*flag.choices, *flag.refused}


def test_an_alias_belongs_to_one_flag():
    names = [name.replace("-", "_") for flag in FLAGS.values() for name in (flag.name, *flag.aliases)]
    assert len(names) == len(set(names))


def test_given_twice_the_last_one_counts():
    assert parse("--max_decode_seqs=4 --max-num-seqs=8").max_decode_seqs == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max_decode_seqs=0", "--max_decode_seqs=0 must be at least 1."),
        ("--max-num-seqs -3", "--max_decode_seqs=-3 must be at least 1."),
        ("--max_model_len=2147483648", "--max_model_len=2147483648 must be at most 2147483647."),
        ("--seed=-1", "--seed=-1 must be at least 0."),
        ("--seed=4294967296", "--seed=4294967296 must be at most 4294967295."),
        ("--port=70000", "--port=70000 must be at most 65535."),
        ("--hbm_utilization_factor=0", "--hbm_utilization_factor=0.0 must be above 0."),
        ("--hbm_utilization_factor=1.1", "--hbm_utilization_factor=1.1 must be at most 1."),
        ("--hbm_utilization_factor=nan", "--hbm_utilization_factor=nan must be above 0."),
        ("--gpu-memory-utilization 90", "--gpu_memory_utilization=90.0 must be at most 1."),
        ("--max_model_len=4k", "--max_model_len=4k must be an integer."),
        ("--hbm_utilization_factor=most", "--hbm_utilization_factor=most must be a number."),
        ("--block_size=64", "--block_size=64 is not one of 8, 16, 32, 2048, 8192."),
        ("--block_size=x", "--block_size=x must be an integer."),
        ("--tokenizer_mode=fast", "--tokenizer_mode=fast is not one of auto, slow."),
        ("--enable_jit=false", "--enable_jit=false takes no value: write --enable_jit or --no-enable_jit."),
        ("--no-warmup=1", "--no-warmup=1 takes no value: write --warmup or --no-warmup."),
        ("--max_model_len", "--max_model_len: expected one argument."),
        ("--model=", "--model= is empty; name a model, or leave the flag out."),
    ],
)
def test_a_bad_value_is_refused_with_its_flag_and_limit(line, message):
    assert refusal(line) == message


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_model_len", "4096", "--max_model_len='4096' must be an integer."),
        ("max_model_len", 0, "--max_model_len=0 must be at least 1."),
        ("max_decode_seqs", True, "--max_decode_seqs=True must be an integer."),
        ("max_decode_seqs", None, "--max_decode_seqs=None must be an integer."),
        ("max_decode_seqs", 2.0, "--max_decode_seqs=2.0 must be an integer."),
        ("enable_jit", 1, "--enable_jit=1 must be True or False."),
        ("hbm_utilization_factor", math.nan, "--hbm_utilization_factor=nan must be above 0."),
        ("model", Path("folder"), f"--model={Path('folder')!r} must be a text."),
        ("block_size", 64, "--block_size=64 is not one of 8, 16, 32, 2048, 8192."),
    ],
)
def test_python_is_held_to_the_same_limits(field, value, message):
    with pytest.raises(ConfigError) as caught:
        Config(**{field: value})
    assert str(caught.value) == message


def test_a_whole_number_is_a_share_too():
    assert Config(hbm_utilization_factor=1).hbm_utilization_factor == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--dtype=float16", "--dtype=float16 is refused: its range is too small"),
        ("--dtype half", "--dtype=half is refused"),
        ("--kv-cache-dtype=fp8_e5m2", "--kv_cache_dtype=fp8_e5m2 is refused: its 2 bits for the fraction"),
        ("--load_format=pt", "--load_format=pt is refused: weights are read from safetensors"),
        ("--trust-remote-code", "--trust_remote_code is refused: there is no part that runs code"),
    ],
)
def test_what_will_never_be_served_is_refused_with_the_reason(line, words):
    assert words in refusal(line)


def test_switching_remote_code_off_is_fine():
    assert parse("--no-trust_remote_code") == Config()


@pytest.mark.parametrize(
    ("line", "first", "second"),
    [
        ("--enable_prefix_cache_hbm --prefill_len_padding=100", "prefill_len_padding=100", "block_size=32"),
        ("--enable_prefix_cache_hbm --block_size=2048", "prefill_len_padding=512", "block_size=2048"),
        (
            "--gpu_memory_utilization=0.8 --hbm_utilization_factor=0.7",
            "hbm_utilization_factor=0.7",
            "gpu_memory_utilization=0.8",
        ),
        (
            "--gpu_memory_utilization=0.8 --hbm_utilization_factor=0.9",
            "hbm_utilization_factor=0.9",
            "gpu_memory_utilization=0.8",
        ),
        ("--max_num_batched_tokens=255", "max_num_batched_tokens=255", "max_decode_seqs=256"),
        (
            "--enable_chunked_prefill --max_decode_seqs=8 --max_num_batched_tokens=127",
            "max_num_batched_tokens=127",
            "less than 128",
        ),
        ("here --model=there", "'here'", "--model=there"),
    ],
)
def test_a_contradiction_names_both_sides(line, first, second):
    message = refusal(line)
    assert first in message
    assert second in message


def test_keywords_are_known_under_every_spelling_of_their_flags():
    config = Config.from_keywords(max_num_seqs=4, enable_prefix_caching=True, max_model_len=128)
    assert (config.max_decode_seqs, config.enable_prefix_cache_hbm, config.max_model_len) == (4, True, 128)
    with pytest.raises(ConfigError, match="no setting max_modle_len; did you mean max_model_len"):
        Config.from_keywords(max_modle_len=4)
    with pytest.raises(ConfigError, match="max_decode_seqs, which is given already"):
        Config.from_keywords(max_running_seqs=4, max_num_seqs=5)
    with pytest.raises(ConfigError, match="port: a setting of the server"):
        Config.from_keywords(port=8000, max_model_len=128)


def test_a_config_made_in_python_contradicts_itself_the_same_way():
    with pytest.raises(ConfigError, match=r"hbm_utilization_factor=0\.7 and --gpu_memory_utilization=0\.8"):
        Config(hbm_utilization_factor=0.7, gpu_memory_utilization=0.8)


@pytest.mark.parametrize(
    "line",
    [
        "--block_size=2048",
        "--block_size=8192 --enable_chunked_prefill",
        "--enable_prefix_cache_hbm --block_size=2048 --prefill_len_padding=4096",
        "--enable_prefix_cache_hbm --block_size=8 --prefill_len_padding=8",
        "--prefill_len_padding=100",
        "--decode_seqs_padding=128 --max_decode_seqs=4",
        "--num_blocks=10 --hbm_utilization_factor=0.5",
        "--num_blocks=10 --gpu_memory_utilization=0.5",
        "--enable_chunked_prefill --max_num_batched_tokens=512 --max_model_len=2048",
        "--max_num_batched_tokens=256 --max_model_len=256",
        "--max_num_batched_tokens=512 --max_model_len=2048",
    ],
)
def test_settings_that_go_together_are_accepted(line):
    parse(line)


def test_adapters_have_names_and_prefixes():
    config = parse("--enable_lora --lora_modules=a=gs://b/c=d,,e=f/g --lora_allowed_prefixes=gs://b/c/,owner/")
    assert config.adapter_sources == {"a": "gs://b/c=d", "e": "f/g"}
    assert config.adapter_prefixes == ("gs://b/c/", "owner/")
    assert Config().adapter_sources == {}
    assert Config().adapter_prefixes == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lora_modules=a=x", "--lora_modules=a=x needs --enable_lora."),
        ("--lora_allowed_prefixes=gs://b/", "--lora_allowed_prefixes=gs://b/ needs --enable_lora."),
        ("--enable_lora --lora_modules=a=x,a=y", "--lora_modules names two adapters 'a'."),
        ("--enable_lora --lora_modules=m=x --model=m", "--lora_modules: 'm' is a name of the model itself."),
        ("--enable_lora --lora_modules=hex-mini=x", "--lora_modules: 'hex-mini' is a name of the model itself."),
        (
            "--enable_lora --lora_modules=n=x --served_model_name=m,n",
            "--lora_modules: 'n' is a name of the model itself.",
        ),
        *(
            (
                f"--enable_lora --lora_modules={each}",
                f"--lora_modules: {each[:200]!r} is not NAME=SOURCE, with a name of 1 to 256 characters and no space in"
                " it; several have commas between.",
            )
            for each in ("a", "a=", "=x", f"{'a' * 257}=x")
        ),
        ("--max_lora_rank=513", "--max_lora_rank=513 must be at most 512."),
        ("--max_num_mem_cached_lora=257", "--max_num_mem_cached_lora=257 must be at most 256."),
    ],
)
def test_adapters_that_could_not_be_served_are_refused(line, message):
    assert refusal(line) == message


def test_a_length_beyond_the_models_context_is_refused():
    assert Config().model_len(8192) == 8192
    assert Config(max_model_len=4096).model_len(8192) == 4096
    assert Config(max_model_len=8192).model_len(8192) == 8192
    with pytest.raises(ConfigError, match="--max_model_len=8193 is beyond the model's context length of 8192 tokens"):
        Config(max_model_len=8193).model_len(8192)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max_modle_len=5", "There is no flag --max_modle_len; did you mean --max_model_len?"),
        ("--max-num-seq 5", "There is no flag --max-num-seq; did you mean --max_num_seqs?"),
        ("--no-enable_jti", "There is no flag --no-enable_jti; did you mean --no-enable_jit?"),
        ("--no-max_model_len", "There is no flag --no-max_model_len; did you mean --max_model_len?"),
        ("--xyzzy 1", "There is no flag --xyzzy; --help lists those there are."),
        ("-x", "There is no flag -x; --help lists those there are."),
        ("--max_model=5", "There is no flag --max_model; did you mean --max_model_len?"),
        ("one two", "Of 'one' 'two' only one can be the model."),
        (
            "one --served-model-name a b",
            "Of 'one' 'b' only one can be the model. Several names have commas between: --served_model_name=a,...",
        ),
        (
            "one --enable_lora --lora-modules a=x b=y",
            "Of 'one' 'b=y' only one can be the model. Several names have commas between: --lora_modules=a=x,...",
        ),
        ("--cors_origins=foo", "--cors_origins: 'foo' is no origin such as https://example.com, nor *."),
    ],
)
def test_an_unknown_flag_is_named_and_the_nearest_one_offered(line, message):
    assert refusal(line) == message


@pytest.mark.parametrize("name", RETIRED | VLLM)
def test_a_flag_of_old_or_of_vllm_is_refused_with_a_hint(name):
    message = refusal(f"--{name}=1")
    assert f"--{name} " in message
    assert (RETIRED | VLLM)[name] in message


def test_a_command_adds_arguments_of_its_own():
    parser = config_parser("hex-llm bench offline", "Measure.")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--json")
    config, arguments = parse_config(parser, ["--input_len=7", "folder", "--seed=3"])
    assert config == Config(model="folder", seed=3)
    assert arguments == argparse.Namespace(input_len=7, json=None)
    with pytest.raises(ConfigError, match="did you mean --input-len"):
        parse_config(parser, ["--inputlen=7"])


def test_a_commands_own_defaults_are_parsed_and_shown():
    parser = config_parser("hex-llm chat", "Talk.", max_decode_seqs=1, warmup=False)
    assert parse_config(parser, [])[0] == Config(max_decode_seqs=1, warmup=False)
    assert parse_config(parser, ["--warmup", "--max-num-seqs=2"])[0] == Config(max_decode_seqs=2)
    flat = " ".join(parser.format_help().split())
    assert "Also --max_running_seqs, --max-num-seqs. (default: 1)" in flat
    assert "(default: 256)" not in flat
    assert Config().max_decode_seqs == 256
    with pytest.raises(ConfigError, match="--max_decode_seqs=0 must be at least 1"):
        config_parser("hex-llm chat", "Talk.", max_decode_seqs=0)


def test_help_shows_every_flag_in_its_group():
    text = config_parser("hex-llm serve", "Serve.", server=True).format_help()
    assert all(f"--{name}" in text for name in FLAGS)
    assert all(f"{flag.group}:" in text for flag in FLAGS.values())
    flat = " ".join(text.split())
    assert "Also --max_running_seqs, --max-num-seqs. (default: 256)" in flat
    assert "safetensors is another word for auto. (default: auto)" in flat


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_the_compilation_cache_is_the_users_unless_said_otherwise(monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert Config().compilation_cache == "/home/someone/.cache/hex_llm/xla"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert Config().compilation_cache == "/home/someone/.cache/hex_llm/xla"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert Config().compilation_cache == "/cache/hex_llm/xla"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/jax")
    assert Config().compilation_cache == "/jax"
    assert Config(compilation_cache_dir="~/mine").compilation_cache == "/home/someone/mine"
    assert Config(compilation_cache_dir="~/mine").cache_folder == Path("/home/someone/mine")
    assert Config(compilation_cache_dir="gs://bucket/mine").compilation_cache == "gs://bucket/mine"
    assert Config(compilation_cache_dir="gs://bucket/mine").cache_folder is None
    assert parse("--compilation_cache_dir=").compilation_cache is None
    assert parse("--compilation_cache_dir=").cache_folder is None


def test_the_page_of_flags_is_up_to_date():
    page = Path(__file__).parents[1] / "docs" / "flags.md"
    assert page.read_text() == flags_markdown(), "run: hex-llm flags > docs/flags.md"


def test_the_page_of_flags_has_a_row_for_each():
    rows = [line for line in flags_markdown().splitlines() if line.startswith("| `--")]
    assert len(rows) == len(FLAGS) + len(RETIRED) + len(VLLM)
    assert any("`--max_running_seqs` `--max-num-seqs` | integer at least 1 | 256 |" in row for row in rows)
    assert any("| `--load_format` |  | auto (or safetensors), dummy | auto |" in row for row in rows)
