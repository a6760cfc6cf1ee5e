"""F34: what schemathesis makes of our own OpenAPI document, good and bad; the answers must be as the document says."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.checkpoints import write_llama
from tests.faults.oracles import check_oracles, take_baseline
from tests.faults.suite import record, sized
from tests.faults.valid_bodies import FLAGS
from tests.server.servers import running_server

ROOT = Path(__file__).parents[2]
# The first goes systematically through values at and beyond every edge, which takes a minute.
PHASES = sized("fuzzing", "coverage,fuzzing")
NUM_EXAMPLES = sized(25, 200)  # for each route
# Besides, what breaks the schema must be refused; but what keeps to it need not be taken: the schema does not say how
# long a prompt may be, in tokens, or which fields contradict each other.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openapi")
    with running_server(write_llama(folder / "model"), folder / "log", *FLAGS, "--enable_docs") as server:
        yield server


def test_every_answer_is_as_the_openapi_document_says(server, tmp_path):
    baseline = take_baseline(server)
    document = server.get("/openapi.json")
    file = tmp_path / "openapi.json"  # asked for by its address, schemathesis leaves that route out
    file.write_bytes(document.content)
    command = [
        *(str(ROOT / ".venv/bin/st"), "run", str(file), f"--url={server.url}", "--mode=all", "--seed=1", "--no-color"),
        *(f"--checks={','.join(CHECKS)}", f"--phases={PHASES}", f"--max-examples={NUM_EXAMPLES}"),
        *("--generation-database=none", "--request-timeout=10", "--suppress-health-check=all"),
    ]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.faults.schema_hooks", "PYTHONPATH": str(ROOT)}
    # In a folder of its own: what it keeps there would be tried again in the next run.
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False, env=os.environ | hooks
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    operations = re.search(r"Tested: (\d+)", done.stdout)
    cases = re.search(r"(\d+) generated", done.stdout)
    assert int(operations[1]) == sum(len(methods) for methods in document.json()["paths"].values())
    assert server.get("/ping", timeout=2).status_code == 200
    check_oracles(server, baseline=baseline, growth_mib=100)
    record("F34", f"{int(cases[1]):,} requests of schemathesis to {operations[1]} routes: 0 x 5xx, all as documented")
