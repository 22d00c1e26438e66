"""The steps of the README in a cluster: install the chart, apply the example, replay, attain.

The operator runs from the rendered chart with the chart's permissions, real engines run on an
emulated device, and a real router counts the outcomes. The operator's requests to the API server
are compared with the table in docs/operator.md.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.charts.rights import documented_rights
from tools.cluster.handle import wait_for
from tools.e2e.clients import replay_load
from tools.e2e.installation import OPERATOR_PODS

from goodput_replay.runs.record_rows import read_judged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tools.e2e.installation import ChartRelease

FOR_ROUTERS = "endpointslices"
"""The operator requests none, but it can grant routers only permissions that it has itself."""
IN_OTHER_TESTS = {("jobs", "get"), ("nodes", "get")}
"""Used only if another owner has a Job's name, or if the engines of a gate run on several nodes."""
COUNT_INTERVAL_S = 60
"""An Event's count increases at most once in this time."""
REVISIONS_KEPT = 5
REPLAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("rights-claim-", {"records": "pvc://missing/runs"}),
    ("rights-claim-", {"records": "pvc://missing/runs"}),
    ("rights-job-", {"records": "s3://missing/runs", "image": "goodput.test/missing:1"}),
)
"""Series and specs of TraceReplays that cannot start. The first two read a claim, and the older one
of them is deleted. The third creates a Job, and deletes it at its end."""
ATTAINED = (
    r"Message: +over the last .*: interactive: \d+ of \d+ requests met their targets, at least .*; "
    r"batch: .*\n"
    r".*\n"
    r" +Reason: +Attained\n +Status: +True\n +Type: +SLOAttained\n"
)
READY = r"\n +Normal +Ready .* engines and 1 of 1 routers are ready\n"
"""A condition and an Event, as `kubectl describe` has them."""


class EditedService:
    """A suspended service with an object that another client edits."""

    def __init__(self, installation: ChartRelease) -> None:
        self._installation = installation
        self._counted_from_s = 0.0

    def edit(self) -> None:
        """Edit the object, not before its Event can be counted again."""
        wait_for(lambda: time.monotonic() > self._counted_from_s, "a minute", 2 * COUNT_INTERVAL_S)
        self._installation.kubectl(
            *("patch", "poddisruptionbudget/rights-engines", "--type=merge"),
            *("--field-manager=another-client", "-p", '{"spec": {"maxUnavailable": 2}}'),
        )
        wait_for(lambda: counts_of(self._installation, "Overwritten"), "an Overwritten Event")
        self._counted_from_s = time.monotonic() + COUNT_INTERVAL_S


@pytest.fixture(scope="module", autouse=True)
def edited(installation: ChartRelease) -> Iterator[EditedService]:
    """A service edited once before the other tests of this module, which take over a minute."""
    installation.apply("rights", suspend=True)
    installation.wait("create", "poddisruptionbudget/rights-engines")
    edited = EditedService(installation)
    edited.edit()
    yield edited
    installation.kubectl("delete", "llmservice/rights")


@pytest.mark.slow
def test_the_example_service_attains_its_slo_on_the_sample_trace(
    installation: ChartRelease, serve: Callable[..., None], tmp_path: Path
) -> None:
    serve("chat")
    # An objective of 99 % needs 410 requests without a miss.
    replay = installation.start_replay("chat", tmp_path / "run", "--rate-scale", "3")
    output, _ = replay.communicate(timeout=240)
    # On a busy machine a late client may make the run INVALID.
    assert replay.returncode in {0, 3}, output
    assert {judged.record.outcome for judged in read_judged(tmp_path / "run")} == {"ok"}, output
    installation.wait("condition=SLOAttained", "llmservice/chat")
    attained = {c["name"]: c["attainment"] for c in installation.status("chat")["classes"]}
    assert set(attained) == {"interactive", "batch"}
    description = installation.kubectl("describe", "llmservice/chat")
    assert re.search(ATTAINED, description), description
    assert re.search(READY, description), description


@pytest.mark.slow
@pytest.mark.usefixtures("own_cluster")
def test_a_restart_of_the_api_server_costs_no_request_and_the_operator_continues(
    installation: ChartRelease, serve: Callable[..., None], tmp_path: Path
) -> None:
    serve("chat", replicas=1)

    def operators() -> list[Any]:
        pods = installation.get(*OPERATOR_PODS)["items"]
        return [pod["status"]["containerStatuses"] for pod in pods]

    before = operators()
    with replay_load(installation, "chat", tmp_path):
        installation.own.kill("kube-apiserver")
        installation.own.start("kube-apiserver")
        installation.own.wait_until("get", "--raw", "/readyz")
        installation.patch("chat", engine={"tokenBudget": {"initial": 1024}}, replicas=2)
        wait_for(lambda: installation.status("chat")["tokenBudget"] == 1024, "the changed budget")
        wait_for(lambda: installation.status("chat")["readyReplicas"] == 2, "another ready engine")
    assert operators() == before, "the same process"


@pytest.mark.slow
@pytest.mark.usefixtures("own_cluster")
def test_the_operator_uses_exactly_the_documented_permissions(
    installation: ChartRelease, edited: EditedService
) -> None:
    def change(**spec: Any) -> None:
        installation.patch("rights", **spec)
        generation = installation.get("llmservice", "rights")["metadata"]["generation"]
        observed = "jsonpath={.status.observedGeneration}=" + str(generation)
        installation.wait(observed, "llmservice/rights")

    def found(kind: str, role: str) -> list[dict[str, Any]]:
        labels = f"goodput.dev/llmservice=rights,goodput.dev/role={role}"
        items: list[dict[str, Any]] = installation.get(kind, "-l", labels)["items"]
        return items

    # Only the latest unused revisions are kept, and a Deployment is deleted once only another
    # revision serves.
    for seconds in range(100, 101 + REVISIONS_KEPT):
        change(router={"drainSeconds": seconds})
    wait_for(
        lambda: len(found("controllerrevisions", "router")) == 1 + REVISIONS_KEPT,
        "the oldest revision is deleted",
    )
    change(engine={"policy": "slo"})
    wait_for(lambda: len(found("deployments", "engine")) == 2, "the new revision has a Deployment")
    change(suspend=False, replicas=1)
    wait_for(
        lambda: len(found("deployments", "engine")) == 1, "the old revision's Deployment is deleted"
    )
    edited.edit()
    wait_for(lambda: 2 in counts_of(installation, "Overwritten"), "the Event is counted twice")

    replays = [create_replay(installation, series, spec) for series, spec in REPLAYS]

    def cleaned_up() -> bool:
        found = installation.get("tracereplays")["items"]
        left = [one for one in found if one["metadata"]["name"] in replays]
        ended = all(one.get("status", {}).get("verdict") == "INVALID" for one in left)
        labels = ("-l", f"goodput.dev/tracereplay={replays[-1]}")
        return ended and len(left) == 2 and not installation.get("jobs", *labels)["items"]

    wait_for(cleaned_up, "the replays have ended, and one of them and the Job are deleted")
    documented = documented_rights()
    requests = installation.audited_requests()
    elsewhere = [line["requestURI"] for line in requests if "objectRef" not in line]
    assert all(uri.startswith("/api") for uri in elsewhere), "discovery needs no permission"
    refused, used = set[tuple[str, str]](), set[tuple[str, str]]()
    for line in requests:
        rights = refused if line["responseStatus"]["code"] in {401, 403} else used
        rights.update(rights_used(line))
    assert refused <= used, "a starting API server may reject requests that it grants later"
    granted = {(resource, verb) for resource, verbs in documented.items() for verb in verbs}
    requested = {(resource, verb) for resource, verb in granted if resource != FOR_ROUTERS}
    assert used | IN_OTHER_TESTS == requested

    [rule] = installation.get("role", "rights-router")["rules"]
    assert rule["resources"] == [FOR_ROUTERS]
    assert set(rule["verbs"]) == documented[FOR_ROUTERS]


def create_replay(installation: ChartRelease, series: str, spec: dict[str, Any]) -> str:
    """Create a TraceReplay that has five seconds to be armed, and return its name."""
    body = {
        "apiVersion": "goodput.dev/v1alpha1",
        "kind": "TraceReplay",
        "metadata": {"generateName": series},
        "spec": {
            "trace": "sample",
            "target": {"url": "http://127.0.0.1:9"},
            "slo": {"classes": [{"name": "chat", "ttftMs": 500, "tpotMs": 50}]},
            "allowProduction": True,
            "armDeadlineSeconds": 5,
            "historyLimit": 1,
            **spec,
        },
    }
    words = ("create", "-f", "-", "-o", "jsonpath={.metadata.name}")
    return installation.kubectl(*words, stdin=json.dumps(body)).strip()


def rights_used(line: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the permissions that a request needed, as (resource, verb)."""
    if reference := line.get("objectRef"):
        parts = reference["resource"], reference.get("subresource")
        resource = "/".join(part for part in parts if part)
        yield resource, line["verb"]
        if line["verb"] == "patch" and line["responseStatus"]["code"] == 201:
            yield resource, "create"  # an apply that creates an object needs it too


def counts_of(installation: ChartRelease, reason: str) -> set[int]:
    """Return the counts of the Events with this reason."""
    events = installation.get("events", "--field-selector", f"reason={reason}")["items"]
    return {event["count"] for event in events if event["involvedObject"]["name"] == "rights"}
