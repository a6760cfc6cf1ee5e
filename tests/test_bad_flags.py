"""A flag that does not fit the model or the machine: one clear line, and the exit code of its kind."""

import pytest

from hex_llm.cli import main
from tests.checkpoints import write_llama


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
