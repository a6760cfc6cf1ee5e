"""Requests in the documents are answered by a real server as it is said there."""

import re
import subprocess

import pytest

from tests.docs.pages import PAGES, Example, examples
from tests.server.servers import RunningServer, running_server

REQUESTS = [
    pytest.param(example, id=f"{example.page}: {example.text[:60]}")
    for page in PAGES
    for example in examples(page)
    if example.kind == "json" and "curl -s localhost:7080" in example.text
]
# Names and times are others each time, and the server of this test has a shorter context.
_CHANGING = re.compile(r'"(id|created|max_model_len)": ?("(?:chatcmpl|cmpl)-[^"]*"|\d+)')


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(None, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.mark.parametrize("example", REQUESTS)
def test_a_request_is_answered_as_the_page_shows(server: RunningServer, example: Example):
    command = example.text.replace("localhost:7080", f"127.0.0.1:{server.port}")
    answered = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True).stdout
    assert _constant(answered) == _constant(example.shown)


def test_requests_are_found():
    assert len(REQUESTS) >= 8


def _constant(answer: str) -> str:
    return _CHANGING.sub(r'"\1"', answer).strip()
