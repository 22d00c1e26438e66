"""The control laws in a cluster: real engines on an emulated device, and real routers.

Three services run at the same time, because each test waits minutes for the laws' windows: one has
load steps, one constant load, and one gets only recommendations. The interval is a second, a tenth
of the default; the windows are not shortened.

One replica sustains 3.4 of these requests per second (80 % of its time, 0.23 s each). With steps of
2048 tokens, a decode takes 155 ms per token.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psutil
import pytest
from tools.cluster.handle import wait_for
from tools.cluster.layout import API_ADDRESS
from tools.e2e import client_process
from tools.e2e.installation import ChartRelease

from goodput_core.contract import PATH_CONTROL_STATE
from goodput_operator.kube.objects import ADMIN_PORT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_cluster")

BUDGET: Final = 2048
INTERVALS: Final = 60
"""The number of decisions in ten minutes at the default interval."""
CHANGES: Final = ("TokenBudget", "Scaled", "Recommended")
"""Reasons of Events about changes of the laws."""


def spec(*, tpot_ms: int = 100, mode: str = "Auto", **fields: Any) -> dict[str, Any]:
    target = {"name": "interactive", "ttftMs": 60000, "tpotMs": tpot_ms, "objective": "90%"}
    return {
        "model": {"source": "emulated://llama-3-70b-4xh100"},
        "engine": {
            "policy": "sarathi",
            "tensorParallel": 4,
            "tokenBudget": {"min": 256, "max": BUDGET, "initial": BUDGET, "law": "fixed"},
        },
        "replicas": None,
        "minReplicas": 1,
        "maxReplicas": 3,
        "slo": {"classes": [target], "default": "interactive"},
        "control": {"mode": mode, "intervalSeconds": 1, "scaleDownStabilizationSeconds": 5},
        **fields,
    }


@dataclass(kw_only=True)
class LoadedServices:
    """Services of an installation, and the process that sends requests to them."""

    installation: ChartRelease
    client: subprocess.Popen[str]
    urls: dict[str, str] = field(default_factory=dict)

    def set_load(self, name: str, per_s: float) -> dict[str, int]:
        """Set the requests per second; return the outcomes of the earlier requests."""
        if name not in self.urls:
            self.urls[name] = self.installation.url(name)
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        rate = {"name": name, "url": self.urls[name], "per_s": per_s}
        self.client.stdin.write(json.dumps(rate) + "\n")
        self.client.stdin.flush()
        outcomes: dict[str, int] = json.loads(self.client.stdout.readline())
        return outcomes

    def engines(self, name: str) -> dict[str, Any]:
        """Return the Deployment of a service's engines."""
        (deployment,) = self.installation.get("deployments", "-l", engine_labels(name))["items"]
        found: dict[str, Any] = deployment
        return found

    def wait_for_replicas(self, name: str, replicas: int, timeout_s: int) -> None:
        """Wait until the engines' Deployment has these replicas, all ready."""
        for path in ("spec.replicas", "status.readyReplicas", "status.replicas"):
            condition = f"jsonpath={{.{path}}}={replicas}"
            words = ("deployments", "-l", engine_labels(name))
            self.installation.wait(condition, *words, timeout_s=timeout_s)

    def decisions(self, name: str) -> list[dict[str, Any]]:
        """Return the decisions in the status, the oldest first."""
        found: list[dict[str, Any]] = self.installation.status(name).get("decisions", [])
        return found[::-1]

    def controlled_state(self, name: str) -> dict[str, Any]:
        """Return everything that the laws change."""
        config = self.installation.get("configmap", f"{name}-config")
        return {
            "decisions": self.decisions(name),
            "budget": self.installation.status(name)["tokenBudget"],
            "replicas": self.engines(name)["spec"]["replicas"],
            "limits": config["data"]["limits.json"],
            "pods": {pod["metadata"]["uid"] for pod in self.installation.pods(name, "engine")},
        }

    def events(self, name: str, *reasons: str) -> list[dict[str, Any]]:
        """Return Events with these reasons on a service or on the Deployment of its engines."""
        names = {name, self.engines(name)["metadata"]["name"]}
        return [
            event
            for event in self.installation.get("events")["items"]
            if event["involvedObject"]["name"] in names and event["reason"] in reasons
        ]

    def engine_budgets(self, name: str) -> list[int]:
        """Return the token budget that each engine reports."""
        pods = self.installation.pods(name, "engine")
        states = (self.installation.read_admin(pod, PATH_CONTROL_STATE) for pod in pods)
        return [json.loads(state)["token_budget"] for state in states]

    def reconciliations(self, name: str) -> list[tuple[datetime, datetime]]:
        """Return the start and the end of each reconciliation, from the operator's log."""
        found, begun = [], None
        for line in self.installation.operator_log():
            if line["event"] == "phase" and line["llmservice"] == name:
                if line["phase"] == "observe":
                    begun = datetime.fromisoformat(line["time"])
                elif line["phase"] == "done" and begun is not None:
                    found.append((begun, datetime.fromisoformat(line["time"])))
        return found

    def count_intervals(self, name: str, since: datetime) -> int:
        """Count the measured intervals of a second.

        Only a reconciliation after the end of an interval measures it.
        """
        count = 0
        for begun, _ in self.reconciliations(name):
            if begun - since >= timedelta(seconds=1):
                since, count = begun, count + 1
        return count


def engine_labels(name: str) -> str:
    return f"goodput.dev/llmservice={name},app.kubernetes.io/component=engine"


@pytest.fixture(scope="module")
def services(installation: ChartRelease) -> Iterator[LoadedServices]:
    """Three settled services, one of them under constant load.

    The constant load needs two replicas, so the service starts with two. Then its bounds become one
    and three. The other services have no load yet, so that theirs is a step.
    """
    specs = {
        "steady": spec(tpot_ms=150, minReplicas=2),
        "stepped": spec(),
        "advised": spec(mode="Recommend"),
    }
    for name, fields in specs.items():
        installation.apply(name, **fields)
    client = subprocess.Popen(
        installation.own.inside(sys.executable, client_process.__file__, "load"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        services = LoadedServices(installation=installation, client=client)
        for name in specs:
            installation.wait_settled(name)
            services.set_load(name, 5.0 if name == "steady" else 0.0)
        wait_for(
            lambda: sum(services.set_load("steady", 5.0).values()) >= 60, "60 completed requests"
        )
        installation.apply("steady", **spec(tpot_ms=150))
        installation.wait_settled("steady")
        yield services
    finally:
        client.communicate()
        for name in specs:
            installation.kubectl("delete", "llmservice", name)
    installation.wait_deleted(*specs)


@pytest.fixture(scope="module")
def steady_since(services: LoadedServices) -> tuple[datetime, dict[str, Any]]:
    """The time since which one service has constant load, and its controlled state then."""
    return datetime.now(UTC), services.controlled_state("steady")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("steady_since")
def test_a_load_step_moves_the_budget_first_then_replicas_and_back_down(
    services: LoadedServices,
) -> None:
    """The token budget is lowered and remains low after the load step.

    The law raises it only if TTFT is missed and TPOT has slack. With fewer requests no target is
    missed, and smaller steps cost nothing. The number of replicas returns to one.
    """
    installation = services.installation
    services.set_load("stepped", 5.0)
    services.set_load("advised", 5.0)
    services.wait_for_replicas("stepped", 2, timeout_s=300)
    decisions = services.decisions("stepped")
    assert all(one["applied"] for one in decisions)
    lowers = "token budget 2048 → 1536, safety 90 % → 85 %: TPOT is"
    assert decisions[0]["message"].startswith(lowers)
    assert decisions[-1]["message"].startswith("replicas 1 → 2:")
    budget = installation.status("stepped")["tokenBudget"]
    assert budget < BUDGET
    assert services.engine_budgets("stepped") == [budget, budget], "the new engine has it too"

    services.set_load("stepped", 0.5)
    services.wait_for_replicas("stepped", 1, timeout_s=900)
    assert set(services.set_load("stepped", 0.5)) == {"done"}, "no request fails"
    changes = changes_of(services, "stepped")
    replicas = [change for change in changes if change.startswith("replicas")]
    assert replicas == ["replicas 1 → 2", "replicas 2 → 1"]
    assert (changes[0], changes[-1]) == ("token budget 2048 → 1536", "replicas 2 → 1")
    final = lowered_budget(changes)
    assert installation.status("stepped")["tokenBudget"] == final <= budget
    assert services.engine_budgets("stepped") == [final]
    scaled = services.events("stepped", "ScalingReplicaSet")
    assert [" ".join(one["message"].split()[:2]) for one in sorted(scaled, key=first_time)] == [
        "Scaled up",
        "Scaled up",
        "Scaled down",
    ]
    events = sorted(services.events("stepped", *CHANGES), key=first_time)
    reasons = [one["reason"] for one in events]
    assert reasons[0] == "TokenBudget"
    assert [reason for reason in reasons if reason == "Scaled"] == ["Scaled"] * 2


def changes_of(services: LoadedServices, name: str) -> list[str]:
    """Return the changes in the status without their reasons, such as `replicas 1 → 2`."""
    messages = [one["message"] for one in services.decisions(name)]
    return [message.partition(":")[0].partition(",")[0] for message in messages]


def lowered_budget(changes: list[str]) -> int:
    """Return the token budget after these changes, each of which lowers it."""
    budget = BUDGET
    for change in changes:
        if change.startswith("token budget"):
            before, after = map(int, change.removeprefix("token budget ").split(" → "))
            assert before == budget > after, changes
            budget = after
    return budget


def first_time(event: dict[str, Any]) -> str:
    found: str = event["firstTimestamp"]
    return found


@pytest.mark.slow
def test_a_recommendation_is_reported_and_nothing_is_changed(services: LoadedServices) -> None:
    installation = services.installation
    services.set_load("advised", 5.0)
    recommends = "jsonpath={.status.recommendedReplicas}=2"
    installation.wait(recommends, "llmservice/advised", timeout_s=300)
    services.set_load("advised", 0.0)
    decisions = services.decisions("advised")
    assert {one["knob"] for one in decisions} == {"TokenBudget", "Replicas"}
    assert not any(one["applied"] for one in decisions)
    status = installation.status("advised")
    assert (status["tokenBudget"], status["replicas"]) == (BUDGET, 1)
    engines = services.engines("advised")
    assert (engines["spec"]["replicas"], engines["metadata"]["generation"]) == (1, 1)
    assert services.engine_budgets("advised") == [BUDGET]

    def messages() -> list[str]:
        return [one["message"] for one in services.events("advised", *CHANGES)]

    expected = {f"{one['message']} ({one['reason']})" for one in decisions}
    wait_for(lambda: expected <= set(messages()), "each decision is an Event")
    assert len(messages()) == len(set(messages())), "equal messages are one Event"
    description = installation.kubectl("describe", "llmservice/advised")
    for message, times in Counter(one["message"] for one in decisions).items():
        assert message.endswith("(recommended, not applied)")
        assert description.count(message) == times + 1, "each in the decisions, and one Event"


@pytest.mark.slow
def test_a_hanging_scrape_is_reported_scales_nothing_and_delays_no_other_service(
    services: LoadedServices, serve: Callable[..., None]
) -> None:
    installation = services.installation
    serve("stuck", **spec(minReplicas=2))
    wait_for_attained(installation, "stuck", "NoTraffic")
    generation = services.engines("stuck")["metadata"]["generation"]
    engine = installation.pods("stuck", "engine")[0]["metadata"]["name"]
    router = installation.pods("stuck", "router")[0]["metadata"]["name"]

    def failed(role: str, pod: str) -> bool:
        messages = [one["message"] for one in services.events("stuck", "ScrapeFailed")]
        return any(one.startswith(f"{role} {pod}: http://") for one in messages)

    with suspended(installation, engine):
        wait_for(lambda: failed("engine", engine), "an Event names the engine")
        wait_for_attained(installation, "stuck", "NoTraffic")  # only the routers' counts matter
    with suspended(installation, router):
        wait_for_attained(installation, "stuck", "ScrapeFailed")
        wait_for(lambda: failed("router", router), "an Event names the router")
    wait_for_attained(installation, "stuck", "NoTraffic")
    installation.wait_settled("stuck")

    assert services.decisions("stuck") == []
    assert services.engines("stuck")["metadata"]["generation"] == generation
    begun, ended = max(services.reconciliations("stuck"), key=lambda one: one[1] - one[0])
    assert 2.5 < (ended - begun).total_seconds() < 30, "the time limit of a scrape, and not more"
    others = [
        one for one in services.reconciliations("steady") if begun < one[0] and one[1] < ended
    ]
    assert others, "another service was reconciled meanwhile"


@contextmanager
def suspended(installation: ChartRelease, pod: str) -> Iterator[None]:
    """Suspend all processes of a pod during the block."""
    processes = installation.own.processes_of(pod)
    assert processes
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def wait_for_attained(installation: ChartRelease, name: str, reason: str) -> None:
    """Wait until the condition SLOAttained has this reason."""
    path = '{.status.conditions[?(@.type=="SLOAttained")].reason}'
    installation.wait(f"jsonpath={path}={reason}", f"llmservice/{name}", timeout_s=120)


@pytest.mark.slow
def test_a_prometheus_server_is_read_instead_of_the_routers(
    services: LoadedServices, serve: Callable[..., None], tmp_path: Path
) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("NOT RUN: prometheus is missing; install it with `apt-get install prometheus`")
    installation, url = services.installation, f"http://{API_ADDRESS}:9090"
    scraped = spec(tpot_ms=400)
    serve("scraped", **scraped)
    wait_for_attained(installation, "scraped", "NoTraffic")
    server = subprocess.Popen(
        installation.own.inside(
            program,
            f"--config.file={write_configuration(tmp_path)}",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address={API_ADDRESS}:9090",
        ),
        stderr=subprocess.DEVNULL,
    )
    try:
        scraped["control"]["prometheus"] = {"url": url}
        installation.apply("scraped", **scraped)
        wait_for_attained(installation, "scraped", "MetricsMissing")  # it scrapes no router yet
        routers = installation.pods("scraped", "router")
        write_configuration(tmp_path, *(pod["status"]["podIP"] for pod in routers))
        server.send_signal(signal.SIGHUP)
        wait_for_attained(installation, "scraped", "NoTraffic")
        services.set_load("scraped", 3.0)
        wait_for_attained(installation, "scraped", "Attained")
        services.set_load("scraped", 0.0)
    finally:
        server.kill()
        server.wait()
    wait_for_attained(installation, "scraped", "ScrapeFailed")
    assert services.decisions("scraped") == []


def write_configuration(folder: Path, *addresses: str) -> Path:
    """Write the configuration of a Prometheus server that scrapes these routers each second."""
    targets = json.dumps([f"{address}:{ADMIN_PORT}" for address in addresses])
    path = folder / "prometheus.yml"
    path.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: routers, static_configs: [{{targets: {targets}}}]}}]\n",
        encoding="utf-8",
    )
    return path


@pytest.mark.slow
def test_constant_load_changes_nothing_for_ten_minutes(
    services: LoadedServices, steady_since: tuple[datetime, dict[str, Any]]
) -> None:
    """The intervals are shorter: sixty, as many as in ten minutes at the default interval.

    The windows of the laws are not. Tests in virtual time show that hours of constant load change
    nothing (tests/core/control/test_closed_loop.py, tests/replay/emulation/test_control_loop.py).
    """
    since, state = steady_since
    wait_for(lambda: services.count_intervals("steady", since) >= INTERVALS, "60 intervals", 300)
    assert services.controlled_state("steady") == state
    assert services.events("steady", *CHANGES) == []
    outcomes = services.set_load("steady", 5.0)
    assert set(outcomes) == {"done"}
    assert outcomes["done"] > 60 + 3 * INTERVALS, "the load was constant"
    # The service with the load step has had constant load since then.
    budget = services.installation.status("stepped")["tokenBudget"]
    assert budget == lowered_budget(changes_of(services, "stepped"))
