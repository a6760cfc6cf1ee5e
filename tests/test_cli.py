"""The command line: which command runs, and what it exits with."""

import importlib.util
import logging
import os
import subprocess
import sys
import types

import pytest

import hex_llm
from hex_llm import cli, log
from hex_llm.config import Config, config_parser, parse_config
from hex_llm.errors import CheckpointError, ConfigError, ContextTooLong, OutOfMemory, StartError


@pytest.fixture(autouse=True)
def _default_log(monkeypatch):
    monkeypatch.delenv("HEX_LLM_LOG_LEVEL", raising=False)
    monkeypatch.delenv("HEX_LLM_VERBOSE_LOG", raising=False)
    logger = logging.getLogger("hex_llm")
    before = logger.level, logger.handlers
    yield
    logger.setLevel(before[0])
    logger.handlers = before[1]


@pytest.fixture
def chat(monkeypatch):
    """Puts a function in the place of the chat command."""

    def replace(main):
        module = types.ModuleType("hex_llm.chat_cli")
        module.main = main  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "hex_llm.chat_cli", module)

    return replace


def test_version_prints_the_version(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"hex-llm {hex_llm.__version__}\n"
    assert cli.main(["--version"]) == 0


def test_help_lists_the_commands_with_a_line_each(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    listed = [line.split("  ")[1:] for line in out.splitlines() if line.startswith("  ")]
    assert [(name, line[-1].strip()) for name, *line in listed] == [
        ("serve", "Serve a model over HTTP."),
        ("chat", "Talk to a model in the terminal."),
        ("bench offline", "Measure the engine without a server."),
        ("bench serve", "Measure a server under load."),
        ("bench plan-disagg", "Simulate which split into prefill and decode workers meets targets."),
        ("plan", "Plan on which machine to serve a model, with which flags, how fast and at what cost."),
        ("tune", "Try flags of a server here, and say which are fastest."),
        ("models", "List the models that are known by name, or show one."),
        ("deploy vertex", "Deploy a model to an endpoint of Vertex AI."),
        ("deploy gke", "Print manifests for Kubernetes, with TPU slices or GPUs of GKE."),
        ("deploy ray", "Print manifests for a Ray cluster on Kubernetes, by the KubeRay operator."),
        ("flags", "Print every flag as Markdown."),
        ("version", "Print the version."),
    ]


def test_without_a_command_the_list_is_shown_and_the_exit_code_is_2(capsys):
    assert cli.main([]) == 2
    assert "chat" in capsys.readouterr().out


def test_the_first_word_of_a_command_lists_its_commands(capsys):
    assert cli.main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert "bench offline" in out
    assert "chat" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["chatt"], "There is no command 'chatt'; did you mean 'chat'?"),
        (["bench", "ofline"], "There is no command 'bench ofline'; did you mean 'bench offline'?"),
        (["xyzzy"], "There is no command 'xyzzy'; hex-llm --help lists those there are."),
        (["deploy", "vertx"], "There is no command 'deploy vertx'; did you mean 'deploy vertex'?"),
        (["version", "--seed=1"], "unrecognized arguments: --seed=1."),
    ],
)
def test_an_unknown_command_is_one_line_and_exit_code_2(argv, message, capsys):
    assert cli.main(argv) == 2
    assert capsys.readouterr() == ("", f"hex-llm: {message}\n")


def test_a_command_gets_the_rest_of_the_line(chat):
    seen = []
    chat(seen.append)
    assert cli.main(["chat", "folder", "--seed=1"]) == 0
    assert seen == [["folder", "--seed=1"]]


def test_a_commands_exit_code_is_passed_on(chat):
    chat(lambda argv: 7)
    assert cli.main(["chat"]) == 7


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StartError("words"), 1),
        (ConfigError("words"), 2),
        (CheckpointError("words"), 3),
        (OutOfMemory("words"), 4),
        (ContextTooLong("words"), 1),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(error, code, chat, capsys):
    def fail(argv):
        raise error

    chat(fail)
    assert cli.main(["chat"]) == code
    assert capsys.readouterr() == ("", "hex-llm: words\n")


def test_an_error_that_is_ours_to_fix_is_not_hidden(chat):
    def fail(argv):
        raise ZeroDivisionError

    chat(fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["chat"])


def test_an_interrupt_exits_with_130(chat):
    def interrupt(argv):
        raise KeyboardInterrupt

    chat(interrupt)
    assert cli.main(["chat"]) == 130


@pytest.mark.parametrize(
    "argv",
    [
        ["--max_modle_len=5"],
        ["--num_hosts=0"],
        ["--block_size=7"],
        ["--log_level=INFO"],
        ["--enable-prefix-caching", "--block-size", "8192"],
        ["--max_model_len"],
    ],
)
def test_bad_flags_of_a_command_exit_with_2(argv, chat, capsys):
    chat(lambda argv: parse_config(config_parser("hex-llm chat", "Talk."), argv) and None)
    assert cli.main(["chat", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hex-llm: ")
    assert err.count("\n") == 1
    assert argv[0].partition("=")[0] in err or "--enable_prefix_cache_hbm" in err


def test_help_of_a_command_shows_its_flags_and_exits_with_0(chat, capsys):
    chat(lambda argv: parse_config(config_parser("hex-llm chat", "Talk."), argv) and None)
    with pytest.raises(SystemExit) as exit:
        cli.main(["chat", "--help"])
    assert exit.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: hex-llm chat [MODEL] [flags]")
    assert "Inference engine:" in out


@pytest.mark.parametrize("module", ["hex_llm.chat_cli", "hex_llm.bench.offline"])
def test_the_module_of_every_listed_command_exists(module):
    assert importlib.util.find_spec(module)


@pytest.mark.parametrize("argv", [["version"], ["--help"], ["flags"]])
def test_small_commands_start_without_the_heavy_libraries(argv):
    code = (
        "import sys; from hex_llm.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'jax', 'jaxlib', 'numpy', 'tokenizers', 'transformers'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("argv", [["flags"], ["flags", "--help"], ["version"]])
def test_a_reader_that_leaves_early_ends_a_command_quietly(argv):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hex_llm.cli", *argv]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=buffered, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("level", ["debug", "INFO", "Warning"])
def test_the_log_level_is_read_in_any_case(level, monkeypatch):
    monkeypatch.setenv("HEX_LLM_LOG_LEVEL", level)
    log.configure()
    assert logging.getLogger("hex_llm").level == logging.getLevelNamesMapping()[level.upper()]


@pytest.mark.parametrize(("name", "value"), [("HEX_LLM_LOG_LEVEL", "loud"), ("HEX_LLM_VERBOSE_LOG", "yes")])
def test_a_bad_log_setting_exits_with_2_and_names_it(name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert cli.main(["version"]) == 2
    assert f"{name}={value}" in capsys.readouterr().err


def test_a_log_line_is_time_level_and_message(capsys):
    log.configure()
    log.configure()
    logging.getLogger("hex_llm.engine").info("loaded %d weights", 3)
    logging.getLogger("hex_llm.engine").debug("not shown")
    line = capsys.readouterr().err
    assert line.endswith(" INFO loaded 3 weights\n")
    assert line[4] == "-"
    assert line[13] == ":"
    assert line.count("\n") == 1


def test_a_verbose_log_line_also_says_where_it_comes_from(monkeypatch, capsys):
    monkeypatch.setenv("HEX_LLM_VERBOSE_LOG", "True")
    log.configure()
    logging.getLogger("hex_llm.engine").info("loaded")
    assert " INFO " in (line := capsys.readouterr().err)
    assert "MainThread hex_llm.engine:" in line


def test_from_args_and_keyword_arguments_make_equal_configs():
    assert Config.from_args(["--seed=3", "--no-warmup"]) == Config(seed=3, warmup=False)
