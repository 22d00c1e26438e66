"""docs/metrics.md lists exactly the metrics that engines, routers, the operator and replays serve.

The page is made from their metrics pages, so types, labels and meanings are those of the code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.replay.conftest import make_run
from tests.replay.live.builders import make_progress, make_tally

from goodput_core import contract
from goodput_core.control import Change, Knob
from goodput_core.engine_state import EngineState
from goodput_core.spec.choices import RouterPolicy
from goodput_core.spec.codec import decode
from goodput_core.spec.llmservice import LLMServiceSpec
from goodput_core.tenants.tenant_list import Tenant, format_tenants, hash_key
from goodput_engine.router.service import RouterService
from goodput_engine.router.settings import RouterSettings
from goodput_engine.router.upstream_client import RetryReason
from goodput_engine.router.upstreams import Upstream
from goodput_engine.server.metrics import EngineMetrics
from goodput_engine.server.settings import ReplicaIdentity
from goodput_operator.reconcile.metrics import OperatorMetrics
from goodput_replay.live.exporter import _RunCollector

if TYPE_CHECKING:
    from typing import Any

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
SPEC = {
    "model": {"source": "emulated://unit"},
    "slo": {
        "classes": [
            {
                "name": "interactive",
                "ttftMs": 500,
                "tpotMs": 50,
                "tbtP99Ms": 100,
                "e2eMs": 9000,
                "objective": "99%",
            }
        ]
    },
}
STATUS = {
    "replicas": 2,
    "readyReplicas": 2,
    "recommendedReplicas": 3,
    "tokenBudget": 1536,
    "classes": [
        {
            "name": "interactive",
            "good": 995,
            "total": 1000,
            "attainment": "99.50%",
            "lower": "98.80%",
            "upper": "99.90%",
            "objective": "99%",
        }
    ],
    "conditions": [{"type": "Ready", "status": "True", "reason": "Serving"}],
    "currentRevision": "chat-1",
    "gate": {"revision": "chat-2", "baseline": "chat-1", "phase": "Replaying", "verdict": "PASS"},
    "learnt": {"startupSeconds": [31, 29]},
    "decisions": [
        {"at": "2026-11-27T02:00:00Z", "knob": "Replicas", "reason": "Demand", "applied": True},
        {"at": "2026-11-27T01:00:00Z", "knob": "Replicas", "reason": "Demand", "applied": True},
    ],
}
SCRAPED: frozenset[str] = frozenset(
    {"job", "instance", "namespace", "pod", "container", "endpoint", "service", "node"}
)
"""Labels of the target that a ServiceMonitor or PodMonitor adds."""


class Documented(NamedTuple):
    """A row of the page."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def engine_text() -> str:
    identity = ReplicaIdentity(llmservice="chat", replica="chat-0", revision="chat-1")
    metrics = EngineMetrics(identity, EngineState)
    return metrics.text().decode()


async def router_text(folder: Path) -> str:
    tenants = folder / "tenants"
    tenant = Tenant(name="acme", weight=1, hashes=(hash_key("key"),))
    tenants.write_text(format_tenants([tenant]))
    spec = decode(LLMServiceSpec, SPEC, "spec")
    settings = RouterSettings(
        llmservice="chat",
        policy=RouterPolicy.ROUND_ROBIN,
        classes=spec.slo.by_name(),
        default_class="interactive",
        tenants_file=tenants,
    )
    replica = Upstream(name="chat-0", url="http://127.0.0.1:1")
    async with (
        RouterService(settings, clock=lambda: 1, upstreams=[replica]) as router,
        aiohttp.ClientSession() as http,
    ):
        router.outcomes.count_retry(RetryReason.LOST)
        key = {"Authorization": "Bearer key"}
        for headers in (key, {**key, "X-SLO-Class": "gold"}):
            async with http.post(f"{router.url}/v1/completions", data=b"{}", headers=headers):
                pass
        async with http.get(f"{router.admin_url}/metrics") as response:
            return await response.text()


def operator_metrics() -> OperatorMetrics:
    metrics = OperatorMetrics()
    with metrics.time_reconciliation():
        metrics.count_call("get", "Pod", 200)
    key = ("default", "chat")
    spec = decode(LLMServiceSpec, SPEC, "spec")
    metrics.set_service(key, spec=spec, desired_replicas=2, status=STATUS)
    change = Change(knob=Knob.REPLICAS, reason="Demand", message="more", applied=True)
    metrics.count_decisions(key, [change])
    return metrics


def operator_text() -> str:
    return operator_metrics().expose(leading=True, waiting=0, overdue_s=0.5).decode()


def replay_text() -> str:
    run = make_run()
    registry = CollectorRegistry()
    registry.register(_RunCollector(make_tally(run), lambda: make_progress(run)))
    return generate_latest(registry).decode()


def documented(text: str) -> list[Documented]:
    """Return the metrics of a page; names are those of queries, so counters end in `_total`."""
    rows = []
    for family in text_string_to_metric_families(text):
        assert family.samples, f"{family.name} has no sample, so that its labels are not known"
        names = dict.fromkeys(name for one in family.samples for name in one.labels if name != "le")
        suffix = "_total" if family.type == "counter" else ""
        rows.append(
            Documented(family.name + suffix, family.type, tuple(names), family.documentation)
        )
    return rows


@pytest.fixture
async def pages(tmp_path: Path) -> dict[str, str]:
    return {
        "Routers": await router_text(tmp_path),
        "Engines": engine_text(),
        "The operator": operator_text(),
        "A replay": replay_text(),
    }


def render(pages: dict[str, str]) -> str:
    head, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## Routers\n")
    parts = [head]
    for title, text in pages.items():
        rows = "\n".join(
            f"| `{one.name}` | {one.kind} | {', '.join(f'`{name}`' for name in one.labels) or '–'} "
            f"| {one.meaning.replace('|', chr(92) + '|')} |"
            for one in documented(text)
        )
        header = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |"
        parts.append(f"\n## {title}\n\n{header}\n{rows}\n")
    return "".join(parts)


@pytest.mark.golden
async def test_the_page_lists_the_metrics_of_the_code(
    pages: dict[str, str], request: pytest.FixtureRequest
) -> None:
    made = render(pages)
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(made, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == made, "rewrite it with `make golden`"


async def test_every_metric_of_the_contract_is_served_by_one_component(
    pages: dict[str, str],
) -> None:
    served = [row.name for text in pages.values() for row in documented(text)]
    named = {
        value
        for name, value in vars(contract).items()
        if name.startswith("METRIC_") and isinstance(value, str)
    }
    assert {name for name in served if name.startswith("goodput_")} == named
    shared = {name for name in served if served.count(name) > 1}
    assert {name for name in shared if not name.startswith("process_")} == {
        contract.METRIC_BUILD_INFO
    }


async def test_no_page_has_creation_times_and_each_process_has_its_own_metrics(
    pages: dict[str, str],
) -> None:
    for title, text in pages.items():
        assert "_created" not in text, title
        if title != "A replay":
            assert "process_cpu_seconds_total" in text, title
            assert "process_resident_memory_bytes" in text, title


async def test_labels_of_the_metrics_survive_a_scrape(pages: dict[str, str]) -> None:
    """Prometheus renames a label that its target has, too, unless `honorLabels` is set.

    The chart sets it for the operator alone, whose metrics name the namespace of the service. Its
    PodMonitor adds the label `role`, and drops the renamed one.
    """
    allowed = {"The operator": {"namespace"}, "Routers": {"role"}, "Engines": {"role"}}
    for title, text in pages.items():
        labels = {label for row in documented(text) for label in row.labels}
        added = SCRAPED if title == "The operator" else SCRAPED | {"role"}
        assert labels & added == allowed.get(title, set()), title


async def test_the_page_explains_every_label(pages: dict[str, str]) -> None:
    head, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## Routers\n")
    cells = [line.split("|")[1] for line in head.splitlines() if line.startswith("| `")]
    explained = {name for cell in cells for name in re.findall("`(.+?)`", cell)}
    labels = {label for text in pages.values() for row in documented(text) for label in row.labels}
    assert explained == labels - {"namespace"}


def test_the_gauges_of_a_service_have_the_values_of_its_spec_and_status() -> None:
    text = operator_text()
    found = {
        (sample.name.removeprefix("goodput_service_"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("llmservice") == "chat"
    }

    def value(name: str, **labels: str) -> float:
        labels |= {"llmservice": "chat", "namespace": "default"}
        return found[name, *sorted(labels.items())]

    assert value("objective_ratio", slo_class="interactive") == 0.99
    targets = {"ttft": 0.5, "tpot": 0.05, "tbt_p99": 0.1, "e2e": 9.0}
    for promise, seconds in targets.items():
        assert value("target_seconds", slo_class="interactive", promise=promise) == seconds
    assert value("attainment_ratio", slo_class="interactive") == 0.995
    assert value("attainment_lower_ratio", slo_class="interactive") == 0.988
    assert value("attainment_upper_ratio", slo_class="interactive") == 0.999
    assert (value("min_replicas"), value("max_replicas"), value("desired_replicas")) == (1, 8, 2)
    statuses = {"True": 1, "False": 0, "Unknown": 0}
    for status, expected in statuses.items():
        assert value("condition", condition="Ready", status=status) == expected
    assert value("condition_reason", condition="Ready", reason="Serving") == 1
    assert value("startup_seconds") == 29
    assert value("revision", use="current", revision="chat-1") == 1
    assert value("gate", revision="chat-2", phase="Replaying", verdict="PASS") == 1
    decision = {"knob": "Replicas", "reason": "Demand", "applied": "true"}
    assert value("decision_timestamp_seconds", **decision) == 1795744800, "the later one"


@pytest.mark.parametrize("status", [{}, {"classes": [], "conditions": None, "decisions": None}])
def test_a_service_without_status_or_valid_spec_has_only_the_known_gauges(
    status: dict[str, Any],
) -> None:
    metrics = OperatorMetrics()
    metrics.set_service(("default", "new"), spec=None, desired_replicas=None, status=status)
    assert b'"new"' not in metrics.expose(leading=True, waiting=0, overdue_s=0)
