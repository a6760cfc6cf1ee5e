"""A model that cannot be served: one clear line, the exit code of its kind, and nothing left behind."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hex_llm.cli import main
from tests.checkpoints import random_tensors, write_llama, write_tensors


def damaged(folder, kind):
    config_path, shard = folder / "config.json", folder / "model.safetensors"
    config = json.loads(config_path.read_text())
    tensors = random_tensors(config)
    match kind:
        case "truncated shard":
            shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
        case "header cut":
            shard.write_bytes(shard.read_bytes()[:40])
        case "empty shard":
            shard.write_bytes(b"")
        case "no shard":
            shard.unlink()
        case "missing tensor":
            del tensors["model.layers.1.mlp.up_proj.weight"]
            write_tensors(folder, tensors)
        case "extra tensor":
            tensors["model.layers.7.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]
            write_tensors(folder, tensors)
        case "wrong shape":
            name = "model.layers.0.self_attn.k_proj.weight"
            tensors[name] = tensors[name][:-1].copy()
            write_tensors(folder, tensors)
        case "not a number":
            tensors["model.norm.weight"][3] = float("nan")
            write_tensors(folder, tensors)
        case "missing field":
            del config["hidden_size"]
            config_path.write_text(json.dumps(config))
        case "unknown architecture":
            config["architectures"] = ["WonderForCausalLM"]
            config_path.write_text(json.dumps(config))
        case "quantized":
            config["quantization_config"] = {"quant_method": "marvel"}
            config_path.write_text(json.dumps(config))
        case "no config":
            config_path.unlink()
        case "config cut":
            config_path.write_text(config_path.read_text()[:50])
        case "tokenizer cut":
            path = folder / "tokenizer.json"
            path.write_text(path.read_text()[:500])
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()


KINDS = {
    "truncated shard": (3, ["model.safetensors"]),
    "header cut": (3, ["model.safetensors"]),
    "empty shard": (3, ["model.safetensors"]),
    "no shard": (3, ["safetensors"]),
    "missing tensor": (3, ["model.layers.1.mlp.up_proj.weight"]),
    "extra tensor": (3, ["model.layers.7.mlp.up_proj.weight"]),
    "wrong shape": (3, ["model.layers.0.self_attn.k_proj.weight", "[31, 64]", "[32, 64]"]),
    "not a number": (3, ["model.norm.weight", "NaN"]),
    "missing field": (3, ["config.json", "hidden_size"]),
    "unknown architecture": (3, ["config.json", "architectures", "WonderForCausalLM"]),
    "quantized": (3, ["config.json", "marvel"]),
    "no config": (3, ["config.json"]),
    "config cut": (3, ["config.json"]),
    "tokenizer cut": (3, ["tokenizer.json"]),
    "no tokenizer": (3, ["tokenizer"]),
}


def complaint(capsys, *argv: str) -> tuple[int, str]:
    code = main(["chat", "--message", "hello", *argv])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    lines = [line for line in printed.err.splitlines() if line.startswith("hex-llm: ")]
    assert len(lines) == 1
    assert printed.err.splitlines()[-1] == lines[0]
    return code, lines[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_model_is_named_in_one_line(kind, tmp_path, capsys):
    folder = write_llama(tmp_path / "model")
    damaged(folder, kind)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    code, line = complaint(capsys, str(folder), "--compilation_cache_dir=")
    expected_code, words = KINDS[kind]
    assert code == expected_code
    for word in words:
        assert word in line
    assert before == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    assert threading.active_count() <= threads + 1
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 1


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--model=nowhere/to/be/found"], 2, ["nowhere/to/be/found"]),
        (["--model=gs://Bucket/model"], 2, ["gs://Bucket/model", "gs://BUCKET/PATH"]),
        (["--max_model_len=513"], 2, ["--max_model_len=513", "512"]),
        (["--num_blocks=1000000000"], 4, ["--num_blocks=1000000000"]),
        (["--tensor_parallel_size=2"], 2, ["--tensor_parallel_size=2"]),
        (["--no-such-flag"], 2, ["--no-such-flag"]),
        (["--max_tokens=600"], 1, ["600", "512"]),
    ],
)
def test_a_flag_that_does_not_fit_is_named_with_its_limit(flags, code, words, tmp_path, capsys):
    model = [] if flags[0].startswith("--model") else [str(write_llama(tmp_path / "model"))]
    code_given = main(["chat", "--message", "hello", *model, *flags])
    error = capsys.readouterr().err
    assert code_given == code
    assert "Traceback" not in error
    for word in words:
        assert word in error


def refused(command: list[str]) -> tuple[subprocess.CompletedProcess, float]:
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    return done, time.monotonic() - started


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["WonderForCausalLM"]}, "architectures is 'WonderForCausalLM'"),
        ({"rope_scaling": {"rope_type": "magic", "factor": 2.0}}, "rope_scaling.rope_type is 'magic'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"hidden_size": 2**30}, "hidden_size is 1073741824, not a number from 1 to 1048576"),
    ],
)
def test_a_server_refuses_a_config_it_cannot_serve_in_one_line_within_five_seconds(changes, field, tmp_path):
    folder = write_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    command = [sys.executable, "-m", "hex_llm.server.api_server", f"--model={folder}", "--port=0"]
    done, seconds = refused(command)
    if seconds > 5:  # other tests run beside, and may have slowed it down
        done, seconds = refused(command)
    assert seconds < 5
    (line,) = [each for each in done.stderr.splitlines() if "config.json" in each]
    assert field in line
    assert "Traceback" not in done.stderr
