"""The dashboard is one that Grafana imports, and asks for metrics and labels that servers have."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hex_llm.deploy.deployment import METRICS_ROUTE
from hex_llm.deploy.manifest import SCALED_BY
from tests.monitoring.page import queryable, rows
from tests.monitoring.queries import labels_of, metrics_of

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "monitoring" / "grafana-dashboard.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
TARGETS = [(panel, target) for panel in GRAPHS for target in panel["targets"]]
VARIABLES = {each["name"]: each for each in BOARD["templating"]["list"]}
# Of github.com/grafana/grafana packages/grafana-data/src/valueFormats/categories.ts.
UNITS = {"none", "short", "percentunit", "s", "reqps", "ops", "Bps"}


def expression(target: dict[str, Any]) -> str:
    """As Prometheus gets it."""
    query = target["expr"].replace("$__rate_interval", "5m").replace("$job", ".*").replace("$instance", ".*")
    assert "$" not in query, f"{target['expr']} has a variable that is not set"
    return query


@pytest.mark.parametrize(("panel", "target"), TARGETS, ids=[f"{p['title']}-{t['refId']}" for p, t in TARGETS])
def test_a_panel_asks_for_what_servers_have_and_names_lines_by_labels_that_it_keeps(panel, target):
    labels = labels_of(expression(target))
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels
    assert metrics_of(target["expr"])


@pytest.mark.parametrize("panel", GRAPHS, ids=lambda panel: panel["title"])
def test_a_panel_has_what_grafana_needs(panel):
    assert panel["type"] in ("timeseries", "stat")
    assert panel["title"]
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert all(each["datasource"] == source for each in (panel, *panel["targets"]))
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs) > 0


def test_the_dashboard_has_what_grafana_needs():
    assert BOARD["uid"]
    assert BOARD["title"]
    assert isinstance(BOARD["schemaVersion"], int)
    assert BOARD["schemaVersion"] >= 30  # below, Grafana would bring panels to the form that these have
    assert "id" not in BOARD  # the number that it has in one Grafana is another dashboard's in the next
    assert (VARIABLES["datasource"]["type"], VARIABLES["datasource"]["query"]) == ("datasource", "prometheus")
    titles = [panel["title"] for panel in GRAPHS]
    assert len(set(titles)) == len(titles)


def test_panels_have_numbers_and_places_of_their_own():
    numbers = [panel["id"] for panel in PANELS]
    assert len(set(numbers)) == len(numbers)
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        columns = range(place["x"], place["x"] + place["w"])
        own = set(itertools.product(columns, range(place["y"], place["y"] + place["h"])))
        assert not own & cells, f"{panel['title']} lies on another panel"
        cells |= own


def test_variables_are_filled_from_a_metric_that_every_server_has():
    for name in ("job", "instance"):
        (metric,) = re.findall(r"label_values\((hexllm:\w+)", VARIABLES[name]["query"]["query"])
        assert not rows()[metric].flag


def test_every_metric_of_a_state_or_an_event_is_on_the_dashboard():
    shown = {metric for panel, target in TARGETS for metric in metrics_of(expression(target))}
    # Kept for those who look: what requests ask for, a mean that the time between tokens has too, a rounded count.
    left_out = {"request_params_n", "request_params_max_tokens", "request_time_per_output_token_seconds"}
    left_out |= {"prompt_tokens_cached_total"}
    missing = {name for name in rows() if not any(each.startswith(name) for each in shown)}
    assert missing == {f"hexllm:{name}" for name in left_out}


def test_what_deployments_scale_by_and_scrape_is_there():
    assert set(SCALED_BY) <= set(queryable())
    assert all(rows()[name].kind == "gauge" and not rows()[name].flag for name in SCALED_BY)
    assert METRICS_ROUTE == "/metrics"
