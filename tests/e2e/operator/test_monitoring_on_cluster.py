"""Dashboards and alerts on a real Prometheus that scrapes real engines, routers and the operator.

The server has the targets and labels that the chart's PodMonitor and ServiceMonitor give it; Debian
builds it without the discovery of Kubernetes. During a replay, one class misses its targets. Two
other services cannot start. Another one has a gated rollout, whose Job loads the pair of engines.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import pytest
import yaml
from tools.cluster.handle import wait_for
from tools.cluster.layout import API_ADDRESS
from tools.e2e.installation import OPERATOR_PODS, ChartRelease
from tools.monitoring.alerts import make_rules
from tools.monitoring.panels import FLEET, SERVICE

from goodput_operator.kube.objects import ADMIN_PORT

if TYPE_CHECKING:
    from collections.abc import Iterator

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
RARE: Final = ("goodput_router_retries_total",)
"""Metrics without a series here: no request is sent twice."""
NOT_YET: Final = ("GoodputGateFailed", "GoodputRolloutPaused")
"""Alerts on states that only a gated rollout has at its end."""


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
        variables = {
            # A run on one engine of the pair, and the next one on the other.
            "$__rate_interval": "20s" if service == NAME else "1m",
            "$__range": "2m",
            "$namespace": self.installation.namespace,
            "$llmservice": service,
        }
        for name, value in variables.items():
            expr = expr.replace(name, value)
        return self.query(expr)

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
    try:
        installation.wait_settled(NAME)
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
            yield monitoring
    finally:
        for name in (NAME, TRIAL, "unpulled", "unscheduled"):
            installation.kubectl("delete", "llmservice", name, "--wait=false")
    installation.wait_deleted(NAME, TRIAL)


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

    def target(pod: dict[str, Any], port: int, **labels: str) -> dict[str, Any]:
        metadata = pod["metadata"]
        names = {"namespace": metadata["namespace"], "pod": metadata["name"]}
        return {
            "targets": [f"{pod['status']['podIP']}:{port}"],
            "labels": {**names, "container": "c", "endpoint": "admin", **labels},
        }

    labels = f"goodput.dev/llmservice in ({NAME},{TRIAL})"
    pods = [
        (pod, pod["metadata"]["labels"]["goodput.dev/role"])
        for pod in installation.get("pods", "-l", labels)["items"]
    ]
    scraped = ("router", "engine", *PAIR)
    # The relabelling of the chart's PodMonitor: the role is that of the pod.
    drop = [{"action": "labeldrop", "regex": "exported_role"}]
    services = [target(pod, ADMIN_PORT, role=role) for pod, role in pods if role in scraped]
    operators = [target(pod, 8080) for pod in installation.get(*OPERATOR_PODS)["items"]]
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
        "scrape_configs": [
            {"job_name": "services", "static_configs": services, "metric_relabel_configs": drop},
            {"job_name": "operator", "honor_labels": True, "static_configs": operators},
        ],
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    receivers = {"route": {"receiver": "none", "group_wait": "1s"}, "receivers": [{"name": "none"}]}
    (folder / "alertmanager.yaml").write_text(yaml.safe_dump(receivers), encoding="utf-8")


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
        if any(name in query.expr for name in RARE):
            continue
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


def test_every_expression_of_an_alert_returns_series(monitoring: Monitoring) -> None:
    for group in make_rules(minimum_requests="50")["groups"]:
        for rule in group["rules"]:
            expr = rule["expr"]
            if "alert" not in rule:
                assert monitoring.query(expr), rule["record"]
            elif rule["alert"] not in NOT_YET:
                # The operator is well, so the alerts on it are not: drop their bounds.
                expr = re.sub(r" (== 0|> 120)$", "", expr)
                assert monitoring.query(expr), rule["alert"]


def test_the_plugin_of_kubectl_shows_the_service_its_decisions_and_load(
    monitoring: Monitoring,
) -> None:
    installation = monitoring.installation
    programs = (installation.cluster.binaries, Path(sys.executable).parent)
    path = ":".join([*map(str, programs), os.environ["PATH"]])

    def plugin(command: str, *words: str) -> Any:
        # kubectl finds its plugin on the PATH.
        done = subprocess.run(
            ["kubectl", "goodput", command, NAME, "-n", installation.namespace, "--json", *words],
            env={**installation.cluster.environment, "PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
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
    def received() -> dict[str, dict[str, Any]]:
        alerts = monitoring.get(f"{ALERTMANAGER}/api/v2/alerts")
        return {one["labels"]["alertname"]: one for one in alerts}

    expected = {
        "GoodputErrorBudgetBurnsFast",
        "GoodputErrorBudgetBurns",
        "GoodputServiceStalled",
        "GoodputReplicasAtMaximum",
    }
    wait_for(lambda: expected <= received().keys(), "Alertmanager has the alerts")
    alerts = received()
    assert alerts.keys() == expected
    burn = alerts["GoodputErrorBudgetBurnsFast"]
    namespace = monitoring.installation.namespace
    assert burn["labels"]["slo_class"] == "interactive"
    summary = burn["annotations"]["summary"]
    assert summary == f"{namespace}/{NAME} burns the error budget of class interactive."
    pages = burn["annotations"]["runbook_url"].rpartition("/")
    assert pages[0] == "https://example.com/runbooks"
    assert alerts["GoodputServiceStalled"]["labels"]["reason"] == "ImagePullFailed"
    assert alerts["GoodputReplicasAtMaximum"]["labels"]["reason"] == "Unschedulable"
