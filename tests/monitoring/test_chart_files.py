"""The chart's dashboards and rules are those of tools/monitoring, and refer to existing metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.monitoring.programs import inserted, run_promtool
from tools.monitoring.__main__ import CHART_FILES, chart_files
from tools.monitoring.alerts import make_rules
from tools.monitoring.panels import FLEET, SERVICE, DashboardSpec, Look

from goodput_core import contract

ROOT = Path(__file__).resolve().parents[2]
BOTH = pytest.mark.parametrize("spec", [SERVICE, FLEET], ids=["service", "services"])
METRICS = {
    value
    for name, value in vars(contract).items()
    if name.startswith("METRIC_") and isinstance(value, str)
}


def panels(spec: DashboardSpec) -> list[Any]:
    return [panel for row in spec.rows for panel in row.panels]


def alerts() -> list[dict[str, Any]]:
    groups = make_rules()["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@pytest.mark.golden
@pytest.mark.parametrize("path", chart_files(), ids=lambda path: path.name)
def test_the_charts_file_is_generated(path: Path, request: pytest.FixtureRequest) -> None:
    text = chart_files()[path]
    if request.config.getoption("--rewrite-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "rewrite it with `make golden`"


def test_the_chart_has_no_other_dashboard() -> None:
    expected = {path for path in chart_files() if path.parent.name == "dashboards"}
    assert set((CHART_FILES / "dashboards").iterdir()) == expected


@BOTH
def test_every_panel_has_a_title_of_its_own_a_note_and_queries(spec: DashboardSpec) -> None:
    titles = [panel.title for panel in panels(spec)]
    assert len(titles) == len(set(titles))
    for panel in panels(spec):
        assert panel.note.endswith(".")
        assert panel.queries


def test_queries_name_only_metrics_of_the_contract() -> None:
    queries = [one.expr for spec in (SERVICE, FLEET) for p in panels(spec) for one in p.queries]
    queries += [rule["expr"] for group in make_rules()["groups"] for rule in group["rules"]]
    used = set()
    for query in queries:
        for name in re.findall(r"\bgoodput_\w+", query.replace(":goodput_", ":recorded_")):
            plain = re.sub(r"_(bucket|sum|count)$", "", name)
            assert {name, plain} & METRICS, name
            used.add(plain if plain in METRICS else name)
    assert len(used) > 40


@BOTH
def test_prometheus_accepts_every_query_of_a_panel(spec: DashboardSpec, tmp_path: Path) -> None:
    queries = [inserted(query.expr) for panel in panels(spec) for query in panel.queries]
    rules = [{"record": f"query_{n}", "expr": query} for n, query in enumerate(queries)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(queries)} rules found" in run_promtool("check", "rules", str(path))


def test_the_json_has_every_panel_with_its_queries() -> None:
    for spec, name in ((SERVICE, "service"), (FLEET, "services")):
        model = json.loads((CHART_FILES / f"dashboards/{name}.json").read_text(encoding="utf-8"))
        assert model["uid"] == spec.uid
        found = {one["title"]: one for one in model["panels"] if one["type"] != "row"}
        assert [one["title"] for one in model["panels"] if one["type"] == "row"] == [
            row.title for row in spec.rows
        ]
        assert list(found) == [panel.title for panel in panels(spec)]
        for panel in panels(spec):
            made = found[panel.title]
            assert [one["expr"] for one in made["targets"]] == [q.expr for q in panel.queries]
            assert all(one["refId"] for one in made["targets"])
            assert made["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert made["fieldConfig"]["defaults"]["unit"] == panel.unit.value
            assert made["fieldConfig"]["defaults"].get("noValue") == panel.empty
            assert (panel.empty is not None) == panel.gate, "without a gate, it says so"
            instant = panel.look in {Look.NUMBERS, Look.TABLE}
            assert all(one.get("instant", False) is instant for one in made["targets"])


def test_decisions_are_annotations_at_their_own_times() -> None:
    model = json.loads((CHART_FILES / "dashboards/service.json").read_text(encoding="utf-8"))
    (decisions,) = model["annotations"]["list"]
    assert contract.METRIC_SERVICE_DECISION_TIME in decisions["expr"]
    assert decisions["expr"].endswith("* 1000"), "Grafana expects milliseconds"
    assert decisions["useValueForTime"] is True


def test_queries_of_a_service_never_count_the_engines_of_a_gate() -> None:
    """Engine metrics of a service are selected by role, which differs for a gate's engines."""
    engine = re.compile(r"\b(?:goodput_engine_|vllm:|sglang:)\w+\{([^}]*)\}")
    selectors = [
        (panel, labels)
        for panel in panels(SERVICE)
        for query in panel.queries
        for labels in engine.findall(query.expr)
    ]
    assert len(selectors) > 40
    for panel, labels in selectors:
        expected = 'role=~"candidate|baseline"' if panel.gate else 'role="engine"'
        assert expected in labels, panel.title


def test_every_alert_has_a_severity_a_sentence_and_a_runbook() -> None:
    pages = set()
    for rule in alerts():
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"].endswith(".")
        page = ROOT / "docs/runbooks" / rule["annotations"]["runbook_url"].rpartition("/")[2]
        pages.add(page)
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {rule['alert']}\n")
        for heading in ("## Meaning", "## Find the cause", "## Remedies"):
            assert heading in text, f"{page.name}: {heading}"
    assert set((ROOT / "docs/runbooks").glob("Goodput*.md")) == pages, "one page for each alert"


def test_the_rules_of_the_chart_are_those_that_are_tested() -> None:
    text = (CHART_FILES / "rules.yaml").read_text(encoding="utf-8")
    rendered = yaml.safe_load(text.replace("__MINIMUM_REQUESTS__", "100"))
    assert rendered == make_rules()
