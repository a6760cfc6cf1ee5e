"""The curl lines of the guides that users come from, word for word but for the host and port."""

import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.server.servers import RunningServer, running_server

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")

MODEL = "meta-llama/Llama-3.3-70B-Instruct"

# Of the guide to Llama on TPUs with vLLM, step 9.
MORNINGS = """curl http://localhost:8000/v1/completions \\
    -H "Content-Type: application/json" \\
    -d '{
        "model": "meta-llama/Llama-3.3-70B-Instruct",
        "prompt": "I love the mornings, because ",
        "max_tokens": 200,
        "temperature": 0
    }'
"""

# The prediction of Hex-LLM's notebooks, on the routes that its guide deploys the container with.
CAR = """curl http://localhost:8000/generate \\
    -H "Content-Type: application/json" \\
    -d '{"instances":[{"prompt":"What is a car?","max_tokens":50,"temperature":1.0,"top_p":1.0,"top_k":1}]}'
"""
PING = "curl -i http://localhost:8000/ping"

CHAT = """curl -N http://localhost:8000/v1/chat/completions \\
    -H "Content-Type: application/json" \\
    -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": true, "temperature": 0}'
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(None, log, f"--served_model_name={MODEL}") as running:
        yield running


def shell(server: RunningServer, line: str) -> str:
    """What a line prints when a shell runs it."""
    line = line.replace("http://localhost:8000", server.url)
    done = subprocess.run(["sh", "-c", line], capture_output=True, timeout=60, check=True)
    return done.stdout.decode()


def test_the_completion_of_vllms_guide(server: RunningServer) -> None:
    response = json.loads(shell(server, MORNINGS))
    assert (response["object"], response["model"]) == ("text_completion", MODEL)
    (choice,) = response["choices"]
    assert choice["text"]
    usage = response["usage"]
    assert usage["prompt_tokens"] > 1
    if choice["finish_reason"] == "length":
        assert usage["completion_tokens"] == 200
    else:
        assert (choice["finish_reason"], usage["completion_tokens"] < 200) == ("stop", True)
    again = json.loads(shell(server, MORNINGS))
    assert again["choices"] == response["choices"]


def test_the_prediction_of_hex_llms_notebooks(server: RunningServer) -> None:
    same = server.post("/v1/completions", {"prompt": "What is a car?", "max_tokens": 50, "temperature": 0}).json()
    assert json.loads(shell(server, CAR)) == {"predictions": [same["choices"][0]["text"]]}


def test_health_as_the_container_is_asked_for_it(server: RunningServer) -> None:
    head, _, body = shell(server, PING).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert json.loads(body) == {"status": "ready"}


def test_a_chat_that_is_streamed_to_a_terminal(server: RunningServer) -> None:
    events = shell(server, CHAT).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "The capital of France is Paris."


def test_a_line_without_its_header_says_what_is_missing(server: RunningServer) -> None:
    line = MORNINGS.replace('    -H "Content-Type: application/json" \\\n', "")
    assert line != MORNINGS
    error = json.loads(shell(server, line))["error"]
    assert "application/json" in error["message"]
