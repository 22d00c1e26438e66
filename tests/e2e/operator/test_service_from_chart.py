"""The promise of the README, in a cluster: install the chart, apply the sample, replay, attained.

Everything is as a user has it: the operator runs from the rendered chart with the chart's own
rights, the engines are real ones on an emulated device, and a real router counts the outcomes.
What the operator asked of the API server is held against the table that its page has.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.charts.rights import documented_rights
from tests.e2e.operator.loading import under_load

from goodput_replay.run.records import read_judged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.e2e.operator.installed import Installed

    Until = Callable[..., Any]

FOR_ROUTERS = "endpointslices"
"""The operator asks for none; but nobody may grant routers what they do not have themselves."""
COUNTED_S = 60
"""What happens again is counted in its Event, once in so long at most."""
REVISIONS_KEPT = 5
ATTAINED = (
    r"Message: +over the last .*: interactive: \d+ of \d+ attained, at least .*; batch: .*\n"
    r".*\n"
    r" +Reason: +Attained\n +Status: +True\n +Type: +SLOAttained\n"
)
READY = r"\n +Normal +Ready .* engines and 1 of 1 routers are ready\n"
"""A condition and an Event, as `kubectl describe` has them."""


class Edited:
    """A service that runs nothing, one of whose objects somebody edits."""

    def __init__(self, installed: Installed, until: Until) -> None:
        self._installed, self._until = installed, until
        self._counted_from_s = 0.0

    def edit(self) -> None:
        """Edit it, so long after the last time that its Event is counted."""
        due_s = self._counted_from_s
        self._until(lambda: time.monotonic() > due_s, "a minute is over", 2 * COUNTED_S)
        self._installed.kubectl(
            *("patch", "poddisruptionbudget/rights-engines", "--type=merge"),
            *("--field-manager=somebody", "-p", '{"spec": {"maxUnavailable": 2}}'),
        )
        self._until(lambda: counts_of(self._installed, "Overwritten"), "it is put back, and said")
        self._counted_from_s = time.monotonic() + COUNTED_S


@pytest.fixture(scope="module", autouse=True)
def edited(installed: Installed, until: Until) -> Iterator[Edited]:
    """Edited once before the other tests of this module, so that a minute passes in them."""
    installed.apply("rights", suspend=True)
    installed.wait("create", "poddisruptionbudget/rights-engines")
    edited = Edited(installed, until)
    edited.edit()
    yield edited
    installed.kubectl("delete", "llmservice/rights")


@pytest.mark.slow
def test_the_sample_service_keeps_its_promise_on_the_sample_trace(
    installed: Installed, serve: Callable[..., None], tmp_path: Path
) -> None:
    serve("chat")
    # 99 % takes 410 requests without a miss.
    replay = installed.replaying("chat", tmp_path / "run", "--rate-scale", "3")
    said, _ = replay.communicate(timeout=240)
    # A busy machine may make the client itself late, which invalidates the run; not its answers.
    assert replay.returncode in {0, 3}, said
    assert {judged.record.outcome for judged in read_judged(tmp_path / "run")} == {"ok"}, said
    installed.wait("condition=SLOAttained", "llmservice/chat")
    attained = {c["name"]: c["attainment"] for c in installed.status("chat")["classes"]}
    assert set(attained) == {"interactive", "batch"}
    story = installed.kubectl("describe", "llmservice/chat")
    assert re.search(ATTAINED, story), story
    assert re.search(READY, story), story


@pytest.mark.slow
@pytest.mark.usefixtures("own_cluster")
def test_a_restart_of_the_api_server_costs_no_request_and_the_operator_works_on(
    installed: Installed, serve: Callable[..., None], until: Until, tmp_path: Path
) -> None:
    serve("chat", replicas=1)
    operators = ("pods", "-l", "app.kubernetes.io/name=goodput-operator")
    before = [pod["status"]["containerStatuses"] for pod in installed.get(*operators)["items"]]
    with under_load(installed, "chat", tmp_path, until):
        installed.own.kill("kube-apiserver")
        installed.own.start("kube-apiserver")
        installed.own.wait_until("get", "--raw", "/readyz")
        patch = {"spec": {"engine": {"tokenBudget": {"initial": 1024}}, "replicas": 2}}
        installed.kubectl("patch", "llmservice/chat", "--type=merge", "-p", json.dumps(patch))
        until(lambda: installed.status("chat")["tokenBudget"] == 1024, "the budget is changed")
        until(lambda: installed.status("chat")["readyReplicas"] == 2, "another engine serves")
    after = [pod["status"]["containerStatuses"] for pod in installed.get(*operators)["items"]]
    assert after == before, "the same process"


@pytest.mark.slow
@pytest.mark.usefixtures("own_cluster")
def test_every_right_in_the_table_is_used_and_no_other(
    installed: Installed, edited: Edited, until: Until
) -> None:
    def change(spec: dict[str, Any]) -> None:
        words = ("patch", "llmservice/rights", "--type=merge", "-p", json.dumps({"spec": spec}))
        installed.kubectl(*words)
        generation = installed.get("llmservice", "rights")["metadata"]["generation"]
        seen = "jsonpath={.status.observedGeneration}=" + str(generation)
        installed.wait(seen, "llmservice/rights")

    def found(kind: str, role: str) -> list[dict[str, Any]]:
        labels = f"goodput.dev/llmservice=rights,goodput.dev/role={role}"
        items: list[dict[str, Any]] = installed.get(kind, "-l", labels)["items"]
        return items

    # Of revisions that nobody uses only the latest are kept, and a Deployment goes once another
    # revision serves alone.
    for seconds in range(100, 101 + REVISIONS_KEPT):
        change({"router": {"drainSeconds": seconds}})
    until(
        lambda: len(found("controllerrevisions", "router")) == 1 + REVISIONS_KEPT,
        "the oldest one goes",
    )
    change({"engine": {"policy": "slo"}})
    until(lambda: len(found("deployments", "engine")) == 2, "the new revision has a Deployment")
    change({"suspend": False, "replicas": 1})
    until(lambda: len(found("deployments", "engine")) == 1, "the old revision's Deployment goes")
    edited.edit()
    until(lambda: 2 in counts_of(installed, "Overwritten"), "it is said that it happened twice")

    documented = documented_rights()
    requests = installed.audited()
    elsewhere = [line["requestURI"] for line in requests if "objectRef" not in line]
    assert all(uri.startswith("/api") for uri in elsewhere), "what is served at all, anyone may ask"
    refused, used = set[tuple[str, str]](), set[tuple[str, str]]()
    for line in requests:
        rights = refused if line["responseStatus"]["code"] in {401, 403} else used
        rights.update(rights_used(line))
    assert refused <= used, "while it starts, the API server may refuse what it grants later"
    granted = {(resource, verb) for resource, verbs in documented.items() for verb in verbs}
    assert used == {(resource, verb) for resource, verb in granted if resource != FOR_ROUTERS}

    [rule] = installed.get("role", "rights-router")["rules"]
    assert rule["resources"] == [FOR_ROUTERS]
    assert set(rule["verbs"]) == documented[FOR_ROUTERS]


def rights_used(line: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The rights that a request needed, as (resource, verb)."""
    if reference := line.get("objectRef"):
        parts = reference["resource"], reference.get("subresource")
        resource = "/".join(part for part in parts if part)
        yield resource, line["verb"]
        if line["verb"] == "patch" and line["responseStatus"]["code"] == 201:
            yield resource, "create"  # asked for as well where an apply finds nothing


def counts_of(installed: Installed, reason: str) -> set[int]:
    """How often things happened of which Events with this reason tell."""
    events = installed.get("events", "--field-selector", f"reason={reason}")["items"]
    return {event["count"] for event in events if event["involvedObject"]["name"] == "rights"}
