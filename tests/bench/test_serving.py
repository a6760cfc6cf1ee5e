"""`hex-llm bench serve` from the command line to the report, against a server that is known to the token."""

import json
import logging
import re
import subprocess
import sys

import pytest

from hex_llm import cli
from hex_llm.bench.serving import main
from hex_llm.errors import ConfigError, StartError
from hex_llm.source import EMBEDDED_MODEL
from hex_llm.text.tokenizer import Tokenizer
from tests.bench.fake_server import NO_FAULT, FakeServer


def figures(report: str) -> dict[str, str]:
    """The values of the report by their labels."""
    return {label.strip(): value for label, value in re.findall(r"^(.{40}) (\S+)$", report, re.MULTILINE)}


def bench(server, line: str = "", *words: str) -> int:
    """Runs the words of a line, and those that may hold spaces."""
    return main(["--base-url", server.url, *line.split(), *words])


@pytest.mark.parametrize("backend", ["openai", "vllm"])
def test_tokens_are_counted_exactly(backend, capsys):
    with FakeServer() as server:
        code = bench(
            server,
            f"--backend {backend} --num-prompts 20 --random-input-len 50 --random-output-len 7 --max-concurrency 4"
            " --ignore-eos --num-warmups 2",
        )
        assert len(server.bodies) == 22
    assert code == 0
    found = figures(capsys.readouterr().out)
    assert found["Successful requests:"] == "20"
    assert found["Failed requests:"] == "0"
    assert found["Maximum request concurrency:"] == "4"
    assert found["Total input tokens:"] == str(20 * 50)
    assert found["Total generated tokens:"] == str(20 * 7)
    body = server.bodies[-1]
    assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("fake", 7, True)
    assert len(body["prompt"]) == 50  # token ids: no tokenizer is known


def test_adapters_are_named_in_turn():
    with FakeServer() as server:
        flags = "--num-prompts 6 --random-input-len 5 --random-output-len 2 --num-warmups 0 --max-concurrency 1"
        assert bench(server, f"{flags} --lora-modules one,two") == 0
    assert [body["model"] for body in server.bodies] == ["one", "two"] * 3
    with pytest.raises(ConfigError, match="--lora_modules needs a backend whose requests name a model"):
        bench(server, "--backend vertex --lora-modules one")
    with pytest.raises(ConfigError, match="--lora_modules=one, has an empty name"):
        bench(server, "--lora-modules one,")


@pytest.mark.parametrize("backend", ["openai", "openai-chat", "generate", "generate-stream", "vertex"])
def test_with_a_tokenizer_prompts_are_texts_of_the_length_asked_for(backend, capsys):
    with FakeServer(usage=False) as server:
        code = bench(
            server, f"--backend {backend} --num-prompts 5 --random-input-len 40 --random-output-len 6",
            "--tokenizer", str(EMBEDDED_MODEL), "--num-warmups", "0",
        )  # fmt: skip
        bodies = server.bodies
    assert code == 0
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    for body in bodies:
        body = body["instances"][0] if backend == "vertex" else body
        text = body["messages"][0]["content"] if backend == "openai-chat" else body["prompt"]
        assert len(tokenizer.encode(text)) == 40
    found = figures(capsys.readouterr().out)
    assert found["Total input tokens:"] == "200"
    # The server tells no usage: its texts are counted.
    text = "t0 t1 t2 t3 t4 t5" + ("" if backend == "vertex" else " ")
    counted = len(tokenizer.encode(text, add_special_tokens=False))
    assert found["Total generated tokens:"] == str(5 * counted)
    assert ("Mean TTFT (ms):" in found, "Mean E2EL (ms):" in found) == (backend != "vertex", backend == "vertex")


@pytest.mark.parametrize("backend", ["generate", "hex-llm", "generate-stream", "vertex"])
@pytest.mark.parametrize("flags", [["--ignore-eos"], ["--extra-body", '{"raw_response": true}']])
def test_answers_of_generate_are_counted_exactly_where_their_length_is_known(backend, flags, capsys):
    with FakeServer() as server:
        argv = f"--backend {backend} --num-prompts 3 --random-input-len 9 --random-output-len 6 --tokenizer"
        assert bench(server, argv, str(EMBEDDED_MODEL), *flags) == 0
    found = figures(capsys.readouterr().out)
    assert (found["Total input tokens:"], found["Total generated tokens:"]) == ("27", "18")


def test_the_embedded_models_tokenizer_is_found_by_its_name(capsys):
    with FakeServer(models=("hex-mini",)) as server:
        assert bench(server, "--num-prompts 2 --random-input-len 20 --random-output-len 2") == 0
        assert all(isinstance(body["prompt"], str) for body in server.bodies)


def test_an_api_key_and_headers_are_sent(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with FakeServer() as server:
        bench(server, "--num-prompts 1 --random-input-len 4 --random-output-len 2 --header X-Team=red")
        assert len(server.heads) == 4  # for the models, a warm-up, the metrics, and one
        assert all("Authorization: Bearer sk-secret\r\nX-Team: red\r\n" in head for head in server.heads)


def test_a_request_rate_spreads_requests(capsys):
    with FakeServer() as server:
        argv = "--num-prompts 10 --random-input-len 4 --random-output-len 2 --request-rate 20 --burstiness 4"
        assert bench(server, argv) == 0
    found = figures(capsys.readouterr().out)
    assert found["Request rate configured (RPS):"] == "20.00"
    assert 0.5 <= float(found["Benchmark duration (s):"]) < 5.0


def test_goodput_is_reported(capsys):
    with FakeServer(prefill_s=0.05) as server:
        argv = "--num-prompts 4 --random-input-len 4 --random-output-len 2 --goodput ttft:10 tpot:10000"
        assert bench(server, argv) == 0
    found = figures(capsys.readouterr().out)
    assert found["Request goodput (req/s):"] == "0.00"
    assert float(found["Request throughput (req/s):"]) > 0


def test_failed_requests_are_counted_and_told(capsys, caplog):
    caplog.set_level(logging.INFO, logger="hex_llm")
    with FakeServer(fault=lambda number: "status" if number % 3 == 1 else NO_FAULT) as server:
        argv = "--num-prompts 9 --random-input-len 4 --random-output-len 2 --num-warmups 0 --max-concurrency 1"
        assert bench(server, argv) == 1
    found = figures(capsys.readouterr().out)
    assert (found["Successful requests:"], found["Failed requests:"]) == ("6", "3")
    assert found["Total generated tokens:"] == "12"
    assert caplog.messages == ["3 of 9 requests failed:", "3 of them: HTTP 429: The queue is full."]


def test_a_warm_up_that_fails_is_the_end_of_it():
    with (
        FakeServer(fault=lambda number: "status") as server,
        pytest.raises(StartError, match=r"^A request before the measurement failed. HTTP 429: The queue is full.$"),
    ):
        bench(server, "--num-prompts 5 --random-input-len 4")


def test_a_server_that_is_not_there_is_one_line(capsys):
    with FakeServer() as server:
        url = server.url
    assert cli.main(["bench", "serve", "--base-url", url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"hex-llm: {url} cannot be asked for its models\. .* cannot be reached: .*\n", err)


def test_a_server_without_a_list_of_models_needs_a_name(capsys):
    with FakeServer(models=()) as server:
        with pytest.raises(StartError, match="name it with --model"):
            bench(server)
        argv = "--model other --num-prompts 1 --random-input-len 4 --random-output-len 2"
        assert bench(server, argv) == 0
        assert server.bodies[-1]["model"] == "other"


def test_a_tokenizer_that_does_not_count_as_the_server_does_is_doubted(capsys, caplog):
    with FakeServer() as server:  # which counts words
        argv = "--num-prompts 2 --random-input-len 20 --random-output-len 2 --tokenizer"
        assert bench(server, argv, str(EMBEDDED_MODEL)) == 0
    assert any("where the prompts have 40" in message for message in caplog.messages)


def test_without_usage_and_tokenizer_chunks_are_counted_and_doubted(capsys, caplog):
    with FakeServer(usage=False) as server:
        assert bench(server, "--num-prompts 2 --random-input-len 20 --random-output-len 5") == 0
    assert figures(capsys.readouterr().out)["Total generated tokens:"] == "10"
    assert any("each chunk is taken for one token" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--backend openai-chat", "--backend=openai-chat needs --tokenizer for random prompts"),
        ("--dataset-name sharegpt --dataset-path x", "--dataset_name=sharegpt needs --tokenizer"),
        ("--tokenizer nowhere", "--tokenizer=nowhere is not a folder with a tokenizer."),
    ],
)
def test_what_needs_a_tokenizer_says_so(argv, message):
    with FakeServer() as server, pytest.raises(ConfigError) as caught:
        bench(server, argv)
    assert str(caught.value).startswith(message)


def test_custom_prompts_are_sent_in_order(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two", "output_tokens": 3}\n{"prompt": "three"}\n')
    with FakeServer() as server:
        argv = "--dataset-name custom --num-prompts 2 --custom-output-len 4 --num-warmups 0 --max-concurrency 1"
        assert bench(server, argv, "--dataset-path", str(path)) == 0
        assert [(body["prompt"], body["max_tokens"]) for body in server.bodies] == [("one two", 3), ("three", 4)]
    found = figures(capsys.readouterr().out)
    assert (found["Total input tokens:"], found["Total generated tokens:"]) == ("3", "7")


def test_the_result_is_written_with_vllms_keys(tmp_path, capsys):
    with FakeServer() as server:
        argv = "--num-prompts 3 --random-input-len 4 --random-output-len 2 --save-result --save-detailed"
        folder = tmp_path / "new" / "folder"
        assert bench(server, argv, "--result-dir", str(folder), "--result-filename", "r.json") == 0
    result = json.loads((folder / "r.json").read_text())
    assert [result[name] for name in ("backend", "model_id", "num_prompts", "request_rate", "max_concurrency")] == [
        "openai", "fake", 3, "inf", None
    ]  # fmt: skip
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (3, 0, 6)
    assert result["input_lens"] == [4, 4, 4]
    assert result["output_lens"] == [2, 2, 2]
    assert result["generated_texts"] == ["t0 t1 "] * 3
    assert [len(gaps) for gaps in result["itls"]] == [1, 1, 1]
    assert {"date", "tokenizer_id", "burstiness", "mean_ttft_ms", "std_tpot_ms", "p99_itl_ms"} <= result.keys()


def test_a_list_of_concurrencies_is_a_run_each_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "load.png"
    with FakeServer(prefill_s=0.005) as server:
        argv = "--num-prompts 6 --random-input-len 8 --random-output-len 3 --max-concurrency 1,3 --save-result"
        assert (
            bench(
                server,
                argv,
                "--plot",
                str(picture),
                "--result-dir",
                str(tmp_path),
                "--result-filename",
                "r.json",
            )
            == 0
        )
        prompts = [tuple(body["prompt"]) for body in server.bodies]
        assert server.peak == 3
    assert len(set(prompts)) == 1 + 2 * 6  # none is sent twice: a prefix cache would know it
    reports = capsys.readouterr().out.split("============ Serving Benchmark Result ============")[1:]
    assert [figures(report)["Maximum request concurrency:"] for report in reports] == ["1", "3"]
    assert [json.loads((tmp_path / f"r-concurrency{n}.json").read_text())["max_concurrency"] for n in (1, 3)] == [1, 3]
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    assert (width, height) == (3 * 6 * 120, 540)


def test_the_result_has_a_name_of_its_own(tmp_path, capsys):
    with FakeServer(models=("org/fake",)) as server:
        argv = "--num-prompts 1 --random-input-len 4 --random-output-len 2 --max-concurrency 2 --save-result"
        assert bench(server, argv, "--result-dir", str(tmp_path)) == 0
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"openai-infqps-concurrency2-fake-\d{8}-\d{6}\.json", path.name)


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("--plot needs matplotlib: pip install '.[plot]' in a checkout.")):
        main(["--plot", str(tmp_path / "a.png")])


@pytest.mark.parametrize(("name", "message"), [("a.pdf", r"must be the name of a \.png file"), ("no/a.png", "folder")])
def test_a_picture_that_could_not_be_written_is_refused_before_the_run(name, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        main(["--plot", str(tmp_path / name)])


def test_neither_jax_nor_matplotlib_is_imported():
    """Also not by a tokenizer that is loaded on the way."""
    code = (
        "import sys\n"
        "from hex_llm.bench import serving\n"
        "serving.Tokenizer.load(serving.Path(sys.argv[1]))\n"
        "print(*{'jax', 'matplotlib'} & sys.modules.keys())\n"
    )
    command = [sys.executable, "-c", code, str(EMBEDDED_MODEL)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
