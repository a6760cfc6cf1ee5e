"""The alerts ask for metrics and labels that servers have, and each has an entry in the runbook."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.page import PAGE
from tests.monitoring.queries import TARGET, labels_of, metrics_of

ALERTS = Path(__file__).parents[2] / "monitoring" / "alerts.yaml"
SCENES = Path(__file__).parent / "alert_scenes.yaml"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]
NAMES = [rule["alert"] for rule in RULES]

# What must not go by unseen.
WATCHED = {
    "hexllm:internal_errors_total",
    "hexllm:invariant_violations_total",
    "hexllm:xla_compiles_after_ready_total",
    "hexllm:engine_last_step_age_seconds",
    "hexllm:event_loop_lag_seconds",
}


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_an_alert_asks_for_what_servers_have_and_tells_of_labels_that_it_keeps(rule):
    labels = labels_of(rule["expr"])
    told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert told <= labels
    assert labels >= TARGET or rule["expr"].startswith("absent(")


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_an_alert_has_a_severity_a_summary_and_an_entry_in_the_runbook(rule):
    assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("page", "ticket")
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (path, anchor) == ("docs/operations.md", rule["alert"].lower())
    (entry,) = re.findall(rf"^### {rule['alert']}\n(.*?)(?=^##)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "**Why.**" in entry
    assert "**Do.**" in entry


def test_names_are_one_each_and_no_entry_is_left_over():
    assert len(set(NAMES)) == len(NAMES)
    assert re.findall(r"^### (HexLLM\w+)$", PAGE.read_text(), re.MULTILINE) == NAMES


def test_what_tells_of_faults_pages():
    pages = [rule["expr"] for rule in RULES if rule["labels"]["severity"] == "page"]
    assert {metric for expr in pages for metric in metrics_of(expr)} >= WATCHED


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_itself_takes_the_rules_and_fires_as_the_scenes_say():
    for words in (["check", "rules", str(ALERTS)], ["test", "rules", str(SCENES)]):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
