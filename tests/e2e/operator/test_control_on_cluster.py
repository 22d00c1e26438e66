"""The control laws at work in a cluster: real engines on an emulated device, real routers.

Three services share the time: each test waits for minutes of the laws' own windows, so while one
load steps up and down, another has been constant for long, and a third one is only advised.
Decisions are a second apart, a tenth of the default; no window is shortened.

A replica bears 3.4 of these requests per second (0.8 of its time, 0.23 s each), and in steps of
2048 tokens who decodes waits for 155 ms a token.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import pytest
from tests.e2e.operator.stage import Stage
from tools.cluster.layout import API_ADDRESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.operator.installed import Installed

    Until = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("own_cluster")

BUDGET: Final = 2048
ROUNDS: Final = 60
"""As many decisions as ten minutes have at the default interval."""
KNOBS: Final = ("TokenBudget", "Scaled", "Recommended")
"""Reasons of Events on what the laws turn."""


def spec(*, tpot_ms: int = 100, mode: str = "Auto", **fields: Any) -> dict[str, Any]:
    promise = {"name": "interactive", "ttftMs": 60000, "tpotMs": tpot_ms, "objective": "90%"}
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
        "slo": {"classes": [promise], "default": "interactive"},
        "control": {"mode": mode, "intervalSeconds": 1, "scaleDownStabilizationSeconds": 5},
        **fields,
    }


@pytest.fixture(scope="module")
def stage(installed: Installed, until: Until) -> Iterator[Stage]:
    """Three services that have settled, one of them under a load that stays the same.

    It takes two replicas, which are there before its floor and ceiling leave one and three open.
    Until its load is known the others are seen without any, so that theirs is a step.
    """
    services = {
        "steady": spec(tpot_ms=150, minReplicas=2),
        "stepped": spec(),
        "advised": spec(mode="Recommend"),
    }
    for name, fields in services.items():
        installed.apply(name, **fields)
    client = subprocess.Popen(
        installed.own.inside(sys.executable, str(Path(__file__).with_name("offering.py"))),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        stage = Stage(installed=installed, client=client)
        for name in services:
            installed.settled(name)
            stage.offer(name, 5.0 if name == "steady" else 0.0)
        until(lambda: sum(stage.offer("steady", 5.0).values()) >= 60, "the load is known")
        installed.apply("steady", **spec(tpot_ms=150))
        installed.settled("steady")
        yield stage
    finally:
        client.communicate()
        for name in services:
            installed.kubectl("delete", "llmservice", name)
    for name in services:
        installed.wait("delete", "pods", "-l", f"goodput.dev/llmservice={name}", timeout_s=90)


@pytest.fixture(scope="module")
def before(stage: Stage) -> tuple[datetime, dict[str, Any]]:
    """Since when the load of one service stays the same, and what was in force there then."""
    return datetime.now(UTC), stage.in_force("steady")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("before")
def test_a_load_step_moves_the_budget_first_then_replicas_and_back_down(stage: Stage) -> None:
    """The budget's way is down, and it stays there when the load has gone.

    By the laws it rises where TTFT is missed and TPOT has slack; with fewer requests no promise is
    missed, and smaller steps cost nothing. What returns is the replica.
    """
    stage.offer("stepped", 5.0)
    stage.offer("advised", 5.0)
    stage.until_replicas("stepped", 2, timeout_s=180)
    risen = stage.decisions("stepped")
    assert all(one["applied"] for one in risen)
    assert risen[0]["message"].startswith("token budget 2048 → 1536, safety 90 % → 85 %: TPOT is")
    assert risen[-1]["message"].startswith("replicas 1 → 2:")
    told = stage.installed.status("stepped")["tokenBudget"]
    assert told < BUDGET
    assert stage.engine_budgets("stepped") == [told, told], "the new one begins with it"

    stage.offer("stepped", 0.5)
    stage.until_replicas("stepped", 1, timeout_s=240)
    outcomes = stage.offer("stepped", 0.5)
    assert set(outcomes) == {"ok"}, "no request notices"
    moves = moves_of(stage, "stepped")
    replicas = [move for move in moves if move.startswith("replicas")]
    assert replicas == ["replicas 1 → 2", "replicas 2 → 1"]
    assert (moves[0], moves[-1]) == ("token budget 2048 → 1536", "replicas 2 → 1")
    left = lowered(moves)
    assert stage.installed.status("stepped")["tokenBudget"] == left <= told
    assert stage.engine_budgets("stepped") == [left]
    scaled = stage.events("stepped", "ScalingReplicaSet")
    assert [" ".join(one["message"].split()[:2]) for one in sorted(scaled, key=when)] == [
        "Scaled up",
        "Scaled up",
        "Scaled down",
    ]
    story = [one["reason"] for one in sorted(stage.events("stepped", *KNOBS), key=when)]
    assert story[0] == "TokenBudget"
    assert [reason for reason in story if reason == "Scaled"] == ["Scaled"] * 2


def moves_of(stage: Stage, name: str) -> list[str]:
    """What was turned, and from what to what, without why."""
    return [one["message"].partition(":")[0].partition(",")[0] for one in stage.decisions(name)]


def lowered(moves: list[str]) -> int:
    """The token budget after these moves, none of which raises it."""
    budget = BUDGET
    for move in moves:
        if move.startswith("token budget"):
            before, after = map(int, move.removeprefix("token budget ").split(" → "))
            assert before == budget > after, moves
            budget = after
    return budget


def when(event: dict[str, Any]) -> str:
    found: str = event["firstTimestamp"]
    return found


@pytest.mark.slow
def test_what_is_recommended_is_told_and_nothing_is_changed(stage: Stage, until: Until) -> None:
    stage.offer("advised", 5.0)
    recommends = "jsonpath={.status.recommendedReplicas}=2"
    stage.installed.wait(recommends, "llmservice/advised", timeout_s=180)
    stage.offer("advised", 0.0)
    decisions = stage.decisions("advised")
    assert {one["knob"] for one in decisions} == {"TokenBudget", "Replicas"}
    assert not any(one["applied"] for one in decisions)
    status = stage.installed.status("advised")
    assert (status["tokenBudget"], status["replicas"]) == (BUDGET, 1)
    engines = stage.engines("advised")
    assert (engines["spec"]["replicas"], engines["metadata"]["generation"]) == (1, 1)
    assert stage.engine_budgets("advised") == [BUDGET]

    def told() -> list[str]:
        return [one["message"] for one in stage.events("advised", *KNOBS)]

    words = {f"{one['message']} ({one['reason']})" for one in decisions}
    until(lambda: words <= set(told()), "each decision is an Event")
    assert len(told()) == len(set(told())), "the same words are one Event"
    story = stage.installed.kubectl("describe", "llmservice/advised")
    decided = Counter(one["message"] for one in decisions)
    for message, times in decided.items():
        assert message.endswith("(recommended, not applied)")
        assert story.count(message) == times + 1, "each among the decisions, and one Event"


@pytest.mark.slow
def test_a_scrape_that_hangs_is_told_scales_nothing_and_delays_nobody(
    stage: Stage, serve: Callable[..., None], until: Until
) -> None:
    installed = stage.installed
    serve("stuck", **spec(minReplicas=2))
    until_attained(installed, "stuck", "NoTraffic")
    generation = stage.engines("stuck")["metadata"]["generation"]
    engine = installed.pods("stuck", "engine")[0]["metadata"]["name"]
    router = installed.pods("stuck", "router")[0]["metadata"]["name"]

    def failed(role: str, pod: str) -> bool:
        said = [one["message"] for one in stage.events("stuck", "ScrapeFailed")]
        return any(one.startswith(f"{role} {pod}: http://") for one in said)

    with frozen(engine):
        until(lambda: failed("engine", engine), "the engine is named")
        until_attained(installed, "stuck", "NoTraffic")  # still: routers count, whoever is silent
    with frozen(router):
        until_attained(installed, "stuck", "ScrapeFailed")
        until(lambda: failed("router", router), "the router is named")
    until_attained(installed, "stuck", "NoTraffic")
    installed.settled("stuck")

    assert stage.decisions("stuck") == []
    assert stage.engines("stuck")["metadata"]["generation"] == generation
    slowest = max(stage.turns("stuck"), key=lambda turn: turn[1] - turn[0])
    lasted = (slowest[1] - slowest[0]).total_seconds()
    assert 2.5 < lasted < 30, "a turn waits for an answer, and not for long"
    others = [one for one in stage.turns("steady") if slowest[0] < one[0] and one[1] < slowest[1]]
    assert others, "meanwhile others have theirs"


@contextmanager
def frozen(pod: str) -> Iterator[None]:
    """Stop all processes of a pod, and let them go on."""
    processes = [one for one in psutil.process_iter() if hostname_of(one) == pod]
    assert processes
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def hostname_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("HOSTNAME")
    except psutil.Error:  # it has ended, or is another user's
        return None


def until_attained(installed: Installed, name: str, reason: str) -> None:
    """Wait until the condition SLOAttained has this reason."""
    path = '{.status.conditions[?(@.type=="SLOAttained")].reason}'
    installed.wait(f"jsonpath={path}={reason}", f"llmservice/{name}", timeout_s=60)


@pytest.mark.slow
def test_a_prometheus_server_is_asked_in_place_of_the_routers(
    stage: Stage, serve: Callable[..., None], tmp_path: Path
) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("NOT RUN: there is no prometheus here; `apt-get install prometheus` brings it")
    installed, url = stage.installed, f"http://{API_ADDRESS}:9090"
    asked = spec(tpot_ms=400)
    serve("scraped", **asked)
    until_attained(installed, "scraped", "NoTraffic")
    server = subprocess.Popen(
        installed.own.inside(
            program,
            f"--config.file={scraping(tmp_path)}",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address={API_ADDRESS}:9090",
        ),
        stderr=subprocess.DEVNULL,
    )
    try:
        asked["control"]["prometheus"] = {"url": url}
        installed.apply("scraped", **asked)
        until_attained(installed, "scraped", "MetricsMissing")  # it knows of no router yet
        routers = installed.pods("scraped", "router")
        scraping(tmp_path, *(pod["status"]["podIP"] for pod in routers))
        server.send_signal(signal.SIGHUP)
        until_attained(installed, "scraped", "NoTraffic")
        stage.offer("scraped", 3.0)
        until_attained(installed, "scraped", "Attained")
        stage.offer("scraped", 0.0)
    finally:
        server.kill()
        server.wait()
    until_attained(installed, "scraped", "ScrapeFailed")
    assert stage.decisions("scraped") == []


def scraping(folder: Path, *addresses: str) -> Path:
    """A configuration by which a Prometheus server scrapes these routers each second."""
    targets = json.dumps([f"{address}:9000" for address in addresses])
    path = folder / "prometheus.yml"
    path.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: routers, static_configs: [{{targets: {targets}}}]}}]\n",
        encoding="utf-8",
    )
    return path


@pytest.mark.slow
def test_constant_load_changes_nothing_for_ten_minutes(
    stage: Stage, before: tuple[datetime, dict[str, Any]], until: Until
) -> None:
    """Scaled are the decisions: sixty, as many as ten minutes have at the default interval.

    The laws' windows are not: that hours of constant load change nothing is shown in virtual time
    (tests/core/control/test_closed_loop.py, tests/replay/emulation/test_control_loop.py).
    """
    since, in_force = before
    until(lambda: stage.rounds("steady", since) >= ROUNDS, "enough rounds", 180)
    assert stage.in_force("steady") == in_force
    assert stage.events("steady", *KNOBS) == []
    outcomes = stage.offer("steady", 5.0)
    assert set(outcomes) == {"ok"}
    assert outcomes["ok"] > 60 + 3 * ROUNDS, "the load has lasted"
    # Constant is also what is left of the load that had stepped up.
    assert stage.installed.status("stepped")["tokenBudget"] == lowered(moves_of(stage, "stepped"))
