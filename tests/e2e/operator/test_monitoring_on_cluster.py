"""Dashboards and alerts on a real Prometheus that scrapes real engines, routers and the operator.

The server scrapes with the configuration of docs/dashboards.md. Debian builds it without the
discovery of Kubernetes, so the test gives it the discovered labels. During a replay, one class
misses its targets. Two other services cannot start. Another one has a gated rollout, whose Job
loads the pair of engines. The last one runs a server with vLLM's metrics, and its gate fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import pytest
import yaml
from tests.builders.documented import documented_yaml
from tests.monitoring.programs import inserted
from tools.cluster.handle import wait_for
from tools.cluster.images import EMULATED_VLLM, emulated_vllm_image
from tools.cluster.layout import API_ADDRESS
from tools.cluster.starting import ROOT
from tools.e2e.installation import ChartRelease
from tools.monitoring.alerts import make_rules
from tools.monitoring.panels import FLEET, SERVICE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.monitoring.panels import Panel

pytestmark = [pytest.mark.usefixtures("own_cluster"), pytest.mark.slow]

PROMETHEUS: Final = f"http://{API_ADDRESS}:9095"
ALERTMANAGER: Final = f"http://{API_ADDRESS}:9096"
NAME: Final = "watched"
CLASSES: Final = [
    # No engine emits a first token in this time.
    {"name": "interactive", "ttftMs": 1, "tpotMs": 50, "tbtP99Ms": 500, "e2eMs": 60000,
     "objective": "99%"},
    {"name": "batch", "ttftMs": 30000, "tpotMs": 200, "objective": "95%"},
]  # fmt: skip
TRIAL: Final = "trial"
"""A service with a gated rollout, and without clients."""
GATE: Final = {
    "trace": "sample",
    "window": {"startSeconds": 0, "endSeconds": 10},
    # More than the tests last, so that the pair is there until its service is deleted.
    "pairs": 20,
    "resources": {"requests": {"cpu": "10m"}},
}
IDLE: Final = (
    "Goodput",
    "Outcomes",
    "Refused and failed requests",
    "Queue",
    "Preemptions",
    "Tokens per second",
)
"""Panels whose figures are zero in a service without clients."""
OTHER: Final = "other"
"""A service of another server, whose change does not start."""
DEADLINE_S: Final = 45
"""Time for the pair of OTHER; it passes during the replay."""
OF_OTHER: Final = ("Queue", "KV cache", "Preemptions")
"""Panels that show the metrics of another server."""


@dataclass(frozen=True, kw_only=True)
class Monitoring:
    """The servers, which run inside the cluster's network."""

    installation: ChartRelease

    def get(self, url: str) -> Any:
        return json.loads(self.installation.run_inside("curl", "--silent", "--max-time", "10", url))

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        response = self.get(f"{PROMETHEUS}/api/v1/query?{urlencode({'query': expr})}")
        assert response["status"] == "success", f"{expr}: {response}"
        found: list[dict[str, Any]] = response["data"]["result"]
        return found

    def panel_series(self, expr: str, service: str = NAME) -> list[dict[str, Any]]:
        """Return the series of a panel's query, with the values that Grafana would insert."""
        return self.query(inserted(expr, self.installation.namespace, service))

    def loads_pair(self) -> bool:
        """True if both engines of the gate have computed more than the request that tests them."""
        tokens = PANELS[f"{SERVICE.uid}: Output tokens of the pair"].queries[0].expr
        per_s = [float(one["value"][1]) for one in self.panel_series(tokens, TRIAL)]
        return len(per_s) == len(PAIR) and min(per_s) > 1


@pytest.fixture(scope="module")
def monitoring(
    installation: ChartRelease, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Monitoring]:
    """Prometheus and Alertmanager, after a replay has ended and an alert has been sent."""
    missing = [
        program
        for program in ("prometheus", "prometheus-alertmanager")
        if shutil.which(program) is None
    ]
    if missing:
        packages = " ".join(missing)
        pytest.skip(f"NOT RUN: {packages} is missing; install it with `apt-get install {packages}`")
    folder = tmp_path_factory.mktemp("monitoring")
    slo = {"classes": CLASSES, "default": "interactive"}
    control = {"mode": "Auto", "intervalSeconds": 1}
    bounds = {"replicas": None, "minReplicas": 1, "maxReplicas": 2}
    installation.apply(NAME, slo=slo, control=control, **bounds)
    lenient = [{"name": one["name"], "ttftMs": 10000, "tpotMs": 1000} for one in CLASSES]
    trial = {"slo": {"classes": lenient}, "rollout": {"gate": GATE}}
    installation.apply(TRIAL, replicas=1, **trial)
    installation.apply("unpulled", engine={"policy": "sarathi", "image": "example.test/none:1"})
    too_much = {"policy": "sarathi", "resources": {"requests": {"cpu": "1k"}}}
    installation.apply("unscheduled", engine=too_much, replicas=1)
    installation.apply("held", replicas=1, **trial)
    apply_other(installation, {"slo": {"classes": lenient}, "rollout": {"gate": GATE}})
    try:
        installation.wait_settled(NAME)
        installation.wait_settled("held")
        installation.patch("held", engine=too_much)
        installation.wait_settled(OTHER)
        changed = {"runtime": {"args": ["--no-such-option"]}}
        installation.patch(OTHER, engine=changed, rollout={"progressDeadlineSeconds": DEADLINE_S})
        start_gate(installation)
        write_configuration(folder, installation)
        with running_servers(folder, installation):
            monitoring = Monitoring(installation=installation)
            url = installation.url(NAME)
            installation.run_inside("curl", "--silent", "-d", "{}", f"{url}/v1/completions")
            replay = installation.start_replay(
                NAME,
                folder / "run",
                *("--rate", "8/s", "--duration", "26s", "--input-tokens", "300~50%"),
                *("--output-tokens", "30", "--class-by", "batch: input_tokens >= 300"),
            )
            output, _ = replay.communicate(timeout=180)
            # 3: a busy machine delayed the client, which does not matter here.
            assert replay.returncode in {0, 3}, output
            wait_for(
                lambda: monitoring.query(
                    f'goodput_service_condition_reason{{llmservice="{NAME}",reason="Missed"}}'
                ),
                "the service misses its objective",
            )
            wait_for(monitoring.loads_pair, "the gate has loaded both engines")
            if folder_of_pictures := os.environ.get("GOODPUT_PICTURES"):
                draw_rows(monitoring, folder_of_pictures)
            wait_for(
                lambda: monitoring.query(
                    f'goodput_service_gate{{llmservice="{OTHER}",phase="Failed"}}'
                ),
                "the gate of the other server has failed",
            )
            yield monitoring
    finally:
        for name in (NAME, TRIAL, OTHER, "held", "unpulled", "unscheduled"):
            installation.kubectl("delete", "llmservice", name, "--wait=false")
    installation.wait_deleted(NAME, TRIAL, OTHER)


def draw_rows(monitoring: Monitoring, folder: str) -> None:
    """Draw all rows; that of the gate once it has recorded two pairs of runs."""
    installation = monitoring.installation

    def gate() -> dict[str, Any]:
        found: dict[str, Any] = installation.status(TRIAL)["gate"]
        return found

    def draw(service: str, rows: list[str]) -> None:
        module = (sys.executable, "-m", "tools.monitoring.pictures")
        now = datetime.now(UTC)
        span = ((now - timedelta(minutes=3)).isoformat(), now.isoformat())
        namespace = installation.namespace
        installation.run_inside(*module, PROMETHEUS, namespace, service, *span, folder, *rows)

    of_gate = [row.title for row in SERVICE.rows if any(panel.gate for panel in row.panels)]
    titles = [row.title for spec in (SERVICE, FLEET) for row in spec.rows]
    draw(NAME, [title for title in titles if title not in of_gate])
    wait_for(lambda: gate().get("pairs", "").startswith("2/"), "two pairs are recorded", 300)
    draw(TRIAL, of_gate)


def apply_other(installation: ChartRelease, fields: dict[str, Any]) -> None:
    """Apply a service whose engine is an emulated server with vLLM's command and metrics."""
    installation.own.publish({EMULATED_VLLM: emulated_vllm_image(ROOT)})
    example = ROOT / "examples" / "runtimes" / "emulated-vllm.yaml"
    spec = yaml.safe_load(example.read_text(encoding="utf-8"))["spec"]
    engine = {**spec["engine"], "drainSeconds": 2}
    router = {"replicas": 1}
    installation.apply(
        OTHER, model=spec["model"], engine=engine, router=router, replicas=1, **fields
    )


def start_gate(installation: ChartRelease) -> None:
    """Change the service with a gate, and wait for the engines of candidate and baseline."""
    installation.wait_settled(TRIAL)
    installation.patch(TRIAL, engine={"policy": "orca"})
    pods = (
        "pods",
        "-l",
        f"goodput.dev/llmservice={TRIAL},goodput.dev/role in (baseline,candidate)",
    )
    wait_for(lambda: len(installation.get(*pods)["items"]) == len(PAIR), "the pair exists")
    installation.wait("condition=Ready", *pods, timeout_s=120)


def write_configuration(folder: Path, installation: ChartRelease) -> None:
    """Write the configurations of both servers, and the chart's rules with short intervals."""
    found = {"pod": [*pod_targets(installation)], "endpoints": [*endpoint_targets(installation)]}
    jobs = documented_yaml("dashboards.md", "scrape_configs:")["scrape_configs"]
    for job in jobs:
        [discovery] = job.pop("kubernetes_sd_configs")
        job |= {"static_configs": found[discovery["role"]], "scrape_interval": "1s"}
    rules = make_rules(minimum_requests="50", runbooks="https://example.com/runbooks")
    for group in rules["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule.pop("for", None)
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "alerting": {
            "alertmanagers": [
                {"static_configs": [{"targets": [ALERTMANAGER.removeprefix("http://")]}]}
            ]
        },
        "scrape_configs": jobs,
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    receivers = {"route": {"receiver": "none", "group_wait": "1s"}, "receivers": [{"name": "none"}]}
    (folder / "alertmanager.yaml").write_text(yaml.safe_dump(receivers), encoding="utf-8")


def pod_targets(installation: ChartRelease) -> Iterator[dict[str, Any]]:
    """Yield each port of the pods, with the labels of Prometheus's discovery of pods."""
    services = f"goodput.dev/llmservice in ({NAME},{TRIAL},{OTHER})"
    for pod in installation.get("pods", "-l", services)["items"]:
        metadata, labels = pod["metadata"], pod["metadata"]["labels"]
        if labels["goodput.dev/llmservice"] == OTHER and labels["goodput.dev/role"] in PAIR:
            continue  # they end during the test
        meta = {
            "namespace": metadata["namespace"],
            "pod_name": metadata["name"],
            **prefixed("pod_label_", labels),
            **prefixed("pod_annotation_", metadata.get("annotations") or {}),
        }
        # Labels that the Prometheus operator adds.
        added = {"container": "c", "endpoint": "e"}
        [container] = pod["spec"]["containers"]
        for port in container["ports"] if "podIP" in pod["status"] else ():
            names = {**meta, "pod_container_port_name": port["name"]}
            yield {
                "targets": [f"{pod['status']['podIP']}:{port['containerPort']}"],
                "labels": {**added, **prefixed("__meta_kubernetes_", names)},
            }


def endpoint_targets(installation: ChartRelease) -> Iterator[dict[str, Any]]:
    """Yield each endpoint, with the labels of Prometheus's discovery of endpoints."""
    services = {one["metadata"]["name"]: one for one in installation.get("services")["items"]}
    namespace = installation.namespace
    for endpoints in installation.get("endpointslices")["items"]:
        service = services[endpoints["metadata"]["labels"]["kubernetes.io/service-name"]]
        meta = prefixed("service_label_", service["metadata"].get("labels") or {})
        for endpoint in endpoints["endpoints"] or ():
            for port in endpoints["ports"] or ():
                names = {**meta, "namespace": namespace, "endpoint_port_name": port["name"]}
                yield {
                    "targets": [f"{one}:{port['port']}" for one in endpoint["addresses"]],
                    "labels": prefixed("__meta_kubernetes_", names),
                }


def prefixed(prefix: str, labels: dict[str, str]) -> dict[str, str]:
    """Return labels with a prefix; other characters than those of Prometheus's names become _."""
    return {prefix + re.sub(r"\W", "_", name): value for name, value in labels.items()}


@contextmanager
def running_servers(folder: Path, installation: ChartRelease) -> Iterator[None]:
    commands = (
        (
            "prometheus",
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/prometheus",
            f"--web.listen-address={PROMETHEUS.removeprefix('http://')}",
        ),
        (
            "prometheus-alertmanager",
            f"--config.file={folder}/alertmanager.yaml",
            f"--storage.path={folder}/alertmanager",
            f"--web.listen-address={ALERTMANAGER.removeprefix('http://')}",
            "--cluster.listen-address=",
        ),
    )
    servers = [
        subprocess.Popen(
            installation.own.inside(*command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for command in commands
    ]
    try:
        yield
    finally:
        for server in servers:
            server.kill()
            server.wait()


def test_all_targets_are_scraped_and_keep_their_labels(monitoring: Monitoring) -> None:
    assert {one["value"][1] for one in monitoring.query("up")} == {"1"}
    namespace = monitoring.installation.namespace
    (objective,) = monitoring.query(
        f'goodput_service_objective_ratio{{llmservice="{NAME}",slo_class="batch"}}'
    )
    assert objective["metric"]["namespace"] == namespace
    exported = monitoring.query('{__name__=~"goodput_.+",exported_namespace!=""}')
    exported += monitoring.query('{__name__=~"goodput_.+",exported_role!=""}')
    assert exported == []
    roles = monitoring.query("count by (llmservice, role) (goodput_engine_running_requests)")
    assert {
        (one["metric"]["llmservice"], one["metric"]["role"], one["value"][1]) for one in roles
    } == {(NAME, "engine", "1"), *((TRIAL, role, "1") for role in ("engine", *PAIR))}
    (server,) = monitoring.query("vllm:num_requests_running")
    (pod,) = monitoring.installation.pods(OTHER, "engine")
    place = {"namespace": namespace, "pod": pod["metadata"]["name"]}
    expected = {**place, "llmservice": OTHER, "role": "engine"}
    assert server["metric"].items() >= expected.items()


PAIR: Final = ("baseline", "candidate")
PANELS = {
    f"{spec.uid}: {panel.title}": panel
    for spec in (SERVICE, FLEET)
    for row in spec.rows
    for panel in row.panels
}


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_every_query_of_a_panel_returns_series(monitoring: Monitoring, panel: Panel) -> None:
    for query in panel.queries:
        series = monitoring.panel_series(query.expr, TRIAL if panel.gate else NAME)
        assert series, query.expr
        if "{{role}}" in query.legend and panel.gate:
            assert sorted(one["metric"]["role"] for one in series) == list(PAIR)
        named = re.findall(r"{{(\w+)}}", query.legend)
        for one in series:
            assert set(named) <= set(one["metric"]), f"the legend of {query.expr}"
            assert float(one["value"][1]) == float(one["value"][1]), f"{query.expr} is not NaN"


def test_panels_show_the_counts_of_the_router(monitoring: Monitoring) -> None:
    panel = PANELS["goodput-service: Attainment in this time range"]
    found = {
        one["metric"]["slo_class"]: float(one["value"][1])
        for one in monitoring.panel_series(panel.queries[0].expr)
    }
    assert found == {"interactive": 0, "batch": 1}
    (router,) = monitoring.installation.pods(NAME, "router")
    outcomes = monitoring.installation.state(router["metadata"]["name"])["outcomes"]
    assert outcomes["interactive"]["missed"] + outcomes["batch"]["attained"] >= 150


def test_no_other_panel_and_no_alert_counts_the_pair_of_a_gate(monitoring: Monitoring) -> None:
    """No client sends to the service of the gate, so its own figures show no request."""
    pair = monitoring.query(f'goodput_engine_running_requests{{role=~"{"|".join(PAIR)}"}}')
    pods = {one["metric"]["pod"] for one in pair}
    assert len(pods) == len(PAIR)
    assert monitoring.loads_pair()
    for name, panel in PANELS.items():
        if panel.gate or not name.startswith(f"{SERVICE.uid}: "):
            continue
        for query in panel.queries:
            series = monitoring.panel_series(query.expr, TRIAL)
            assert not pods & {one["metric"].get("pod") for one in series}, query.expr
            if panel.title in IDLE:
                assert {float(one["value"][1]) for one in series} <= {0}, query.expr
    for group in make_rules(minimum_requests="50")["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                series = monitoring.query(f'{rule["record"]}{{llmservice="{TRIAL}"}}')
                assert {float(one["value"][1]) for one in series} <= {0}, rule["record"]
    assert not monitoring.query(f'ALERTS{{llmservice="{TRIAL}",alertname=~".*Budget.*"}}')


def test_panels_show_another_server_and_the_end_of_its_gate(monitoring: Monitoring) -> None:
    for title in OF_OTHER:
        for query in PANELS[f"{SERVICE.uid}: {title}"].queries:
            series = monitoring.panel_series(query.expr, OTHER)
            assert [float(one["value"][1]) for one in series] == [0], query.expr
    gate, *pair = [panel for panel in PANELS.values() if panel.gate]
    [phase] = monitoring.panel_series(gate.queries[0].expr, OTHER)
    assert (phase["metric"]["phase"], phase["metric"]["verdict"]) == ("Failed", "no verdict")
    for panel in pair:
        for query in panel.queries:
            assert not monitoring.panel_series(query.expr, OTHER), "the pair has ended"


def test_every_expression_of_an_alert_returns_series(monitoring: Monitoring) -> None:
    for group in make_rules(minimum_requests="50")["groups"]:
        for rule in group["rules"]:
            expr, name = rule["expr"], rule.get("record", rule.get("alert"))
            if "alert" in rule:
                # The operator is well, so the alerts on it are not: drop their bounds.
                expr = re.sub(r" (== 0|> 120)$", "", expr, flags=re.MULTILINE)
            # The replay ended some minutes ago, perhaps more than the shortest window has. An alert
            # that is kept for gaps looks at every half minute, so a new one may come later.
            query = partial(monitoring.query, f"last_over_time(({expr})[10m:10s])")
            wait_for(query, f"{name} has a series")


def test_the_plugin_of_kubectl_shows_the_service_its_decisions_and_load(
    monitoring: Monitoring,
) -> None:
    installation = monitoring.installation

    def plugin(command: str, *words: str) -> Any:
        done = installation.run_command("kubectl", "goodput", command, NAME, "--json", *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    status = plugin("status")
    assert (status["namespace"], status["name"]) == (installation.namespace, NAME)
    assert {one["name"]: one["good"] for one in status["classes"]}["interactive"] == 0
    why = plugin("why", "--operator-namespace", installation.namespace)
    assert why["problem"] is None
    assert why["decisions"], "the laws have reacted to the missed objective"
    for decision in why["decisions"]:
        assert decision["inputs"]["arrivals"] >= 0, "each has the inputs of the operator's log"
    load = plugin("top")
    assert [one["role"] for one in load][:2] == ["router", "engine"]
    assert load[0]["arrivals_per_s"] == 0
    assert load[1]["token_budget"] > 0


def test_the_charts_live_page_lists_the_services_and_shows_one(monitoring: Monitoring) -> None:
    installation = monitoring.installation
    installation.kubectl(
        "rollout", "status", "deployment/goodput-page", "--timeout=120s", timeout_s=130
    )
    address = installation.get("service", "goodput-page")["spec"]["clusterIP"]

    def page(path: str, host: str = "localhost") -> str:
        words = ("curl", "--silent", "--max-time", "10", "--header", f"Host: {host}")
        return installation.run_inside(*words, f"http://{address}{path}")

    services = page("/")
    path = f"{installation.namespace}/{NAME}/"
    assert f'href="{path}"' in services
    shown = page(f"/{path}")
    assert "1 of 1 replicas ready" in shown
    (router,) = installation.pods(NAME, "router")
    outcomes = installation.state(router["metadata"]["name"])["outcomes"]
    batch = sum(outcomes["batch"][name] for name in ("attained", "missed", "shed"))
    assert f"{outcomes['batch']['attained']:,} of {batch:,}" in shown
    assert "only for this machine" in page("/", "goodput.example.org")


def test_alertmanager_receives_the_alerts_with_their_runbooks(monitoring: Monitoring) -> None:
    def received() -> dict[tuple[str, str], dict[str, Any]]:
        alerts = monitoring.get(f"{ALERTMANAGER}/api/v2/alerts")
        return {(one["labels"]["alertname"], one["labels"]["llmservice"]): one for one in alerts}

    expected = {
        ("GoodputErrorBudgetBurnsFast", NAME),
        ("GoodputErrorBudgetBurns", NAME),
        ("GoodputServiceStalled", "unpulled"),
        ("GoodputReplicasAtMaximum", "unscheduled"),
        ("GoodputGateFailed", OTHER),
        ("GoodputRolloutPaused", "held"),
    }
    wait_for(lambda: expected <= received().keys(), "Alertmanager has the alerts")
    alerts = received()
    assert {name for name, _ in alerts} == {name for name, _ in expected}
    # One ticket for each problem, although a failed gate also pauses the rollout and stalls the
    # service.
    assert [name for name, service in alerts if service == OTHER] == ["GoodputGateFailed"]
    assert [name for name, service in alerts if service == "held"] == ["GoodputRolloutPaused"]
    burn = alerts["GoodputErrorBudgetBurnsFast", NAME]
    namespace = monitoring.installation.namespace
    assert burn["labels"]["slo_class"] == "interactive"
    summary = burn["annotations"]["summary"]
    assert summary == f"{namespace}/{NAME} burns the error budget of class interactive."
    pages = burn["annotations"]["runbook_url"].rpartition("/")
    assert pages[0] == "https://example.com/runbooks"
    assert alerts["GoodputServiceStalled", "unpulled"]["labels"]["reason"] == "ImagePullFailed"
    limited = alerts["GoodputReplicasAtMaximum", "unscheduled"]["labels"]
    assert limited["reason"] == "Unschedulable"
    failed = monitoring.installation.status(OTHER)["failedRevision"]
    text = f"The new revision {failed} of {namespace}/{OTHER} failed its gate."
    assert alerts["GoodputGateFailed", OTHER]["annotations"]["summary"] == text
    paused = alerts["GoodputRolloutPaused", "held"]["labels"]
    assert paused["reason"] == "InsufficientCapacity"
