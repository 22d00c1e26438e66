"""Somebody edits what belongs to a service: it is put back, and said who had set what.

What belongs to somebody else stays as it is, also where a service needs its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from tests.e2e.operator.killing import kill_pod
from tools.cluster.handle import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.operator.installed import Installed

    Until = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change by hand.

    Args:
        kind, name: of what; an engine Deployment has its revision's name, written REVISION.
        patch: a merge patch, or the steps of a JSON patch.
        said: what the Event says of it.
    """

    kind: str
    name: str
    patch: Any
    said: str


def replaced(path: str, value: object) -> list[dict[str, object]]:
    """A JSON patch of one step."""
    return [{"op": "replace", "path": path, "value": value}]


EDITS = {
    "the replicas of the engines": Edit(
        kind="deployment",
        name="REVISION",
        patch={"spec": {"replicas": 3}},
        said="Deployment REVISION {back} .spec.replicas",
    ),
    "an engine's image": Edit(
        kind="deployment",
        name="REVISION",
        patch=replaced("/spec/template/spec/containers/0/image", "example.test/other:1"),
        said='Deployment REVISION {back} .spec.template.spec.containers[name="engine"].image',
    ),
    # One of a list beside ours, which the API server refuses both together.
    "a Service's port": Edit(
        kind="service",
        name="edited",
        patch=replaced("/spec/ports/0/port", 8080),
        said='Service edited {back} .spec.ports[port=8080,protocol="TCP"]',
    ),
    "a label more in a selector": Edit(
        kind="service",
        name="edited-engines",
        patch={"spec": {"selector": {"track": "canary"}}},
        said="Service edited-engines {back} .spec.selector",
    ),
    "another rule in place of a budget's own": Edit(
        kind="poddisruptionbudget",
        name="edited-engines",
        patch={"spec": {"maxUnavailable": None, "minAvailable": "100%"}},
        said="PodDisruptionBudget edited-engines {back} .spec.minAvailable",
    ),
    "the last limits": Edit(
        kind="configmap",
        name="edited-config",
        patch={"data": {"limits.json": "{}"}},
        said="ConfigMap edited-config {back} .data.limits.json",
    ),
    "the label by which it is found": Edit(
        kind="role",
        name="edited-router",
        patch={"metadata": {"labels": {"goodput.dev/llmservice": "another"}}},
        said="Role edited-router {back} .metadata.labels.goodput.dev/llmservice",
    ),
}
BACK = 'was reset to its LLMService: "somebody" had set'


@pytest.fixture(scope="module")
def edited(installed: Installed) -> Iterator[str]:
    """The revision of a service that all tests of this module may edit."""
    installed.apply("edited", replicas=1)
    installed.settled("edited")
    yield str(installed.status("edited")["currentRevision"])
    installed.kubectl("delete", "llmservice", "edited")


def overwritten(installed: Installed, service: str) -> set[str]:
    found = installed.get("events", "--field-selector", f"involvedObject.name={service}")["items"]
    return {event["message"] for event in found if event["reason"] == "Overwritten"}


@pytest.mark.slow
def test_whatever_somebody_edits_is_put_back_and_both_are_named(
    installed: Installed, edited: str, until: Until
) -> None:
    def patch(where: tuple[str, str], patch: Any) -> None:
        how = "json" if isinstance(patch, list) else "merge"
        by = ("--field-manager=somebody", f"--type={how}", "-p", json.dumps(patch))
        installed.kubectl("patch", *where, *by)

    patch(("configmap", "edited-config"), {"data": {"theirs": "stands beside ours, and stays"}})
    for number, (name, edit) in enumerate(EDITS.items(), start=1):
        where = (edit.kind, edit.name.replace("REVISION", edited))
        before = installed.get(*where)
        patch(where, edit.patch)
        said = edit.said.replace("REVISION", edited).format(back=BACK)
        # One after the other: two edits that are found together are one Event.
        until(lambda: said in overwritten(installed, "edited"), said)  # noqa: B023
        assert meaning(installed.get(*where)) == meaning(before), name
        assert len(overwritten(installed, "edited")) == number, "and nothing else"
    assert "theirs" in installed.get("configmap", "edited-config")["data"]
    installed.settled("edited")
    assert installed.status("edited")["summary"]["replicas"] == "1/1"
    assert installed.condition("edited", "Stalled")[0] == "Unhindered"


def meaning(body: dict[str, Any]) -> dict[str, Any]:
    """An object without what the API server counts."""
    stamps = {"resourceVersion", "generation", "managedFields"}
    metadata = {k: v for k, v in body["metadata"].items() if k not in stamps}
    # The Deployment's controller counts the templates that it has seen.
    annotations = {k: v for k, v in metadata["annotations"].items() if "deployment" not in k}
    kept = {k: v for k, v in body.items() if k != "status"}
    return {**kept, "metadata": {**metadata, "annotations": annotations}}


@pytest.mark.slow
def test_whatever_somebody_deletes_is_made_again(
    installed: Installed, edited: str, until: Until
) -> None:
    gone = {
        "poddisruptionbudget": "edited-engines",
        "service": "edited",
        "serviceaccount": "edited-router",
        "deployment": "edited-router",
    }
    before = {kind: uid_of(installed, kind, name) for kind, name in gone.items()}
    for kind, name in gone.items():
        installed.kubectl("delete", kind, name, "--wait=false")
    for kind, name in gone.items():
        until(lambda: uid_of(installed, kind, name) not in {before[kind], None}, kind)  # noqa: B023
    installed.settled("edited")


@pytest.mark.slow
def test_a_deleted_secret_is_there_again_for_the_next_engine(
    installed: Installed, edited: str
) -> None:
    # The operator may not read it, and a running engine needs it no more.
    of_revision = ("secret", "-l", f"goodput.dev/revision={edited}")
    [secret] = installed.get(*of_revision)["items"]
    installed.kubectl("delete", "secret", secret["metadata"]["name"])
    [engine] = installed.pods("edited", "engine")
    kill_pod(installed, engine["metadata"]["name"])
    installed.wait("create", f"secret/{secret['metadata']['name']}")
    installed.settled("edited")


@pytest.mark.slow
def test_what_belongs_to_somebody_else_stays_and_stalls_the_service_until_it_is_gone(
    installed: Installed, asked: Callable[..., None]
) -> None:
    theirs = ("service/hindered-engines", "configmap/hindered-config")
    installed.kubectl("create", "service", "clusterip", "hindered-engines", "--tcp=80")
    # Without a field in common a server-side apply would meet no conflict, and join it.
    installed.kubectl("create", "configmap", "hindered-config")
    before = [installed.get(one) for one in theirs]
    asked("hindered", replicas=1, control={"mode": "Manual", "intervalSeconds": 2})
    installed.wait("condition=Stalled", "llmservice/hindered")
    reason, message = installed.condition("hindered", "Stalled")
    assert reason == "NameConflict"
    assert "Service hindered-engines" in message
    assert "ConfigMap hindered-config" in message
    assert [installed.get(one) for one in theirs] == before, "untouched"
    installed.kubectl("delete", *theirs)
    installed.settled("hindered")
    installed.wait("condition=Stalled=false", "llmservice/hindered")


def uid_of(installed: Installed, kind: str, name: str) -> str | None:
    try:
        return str(installed.get(kind, name)["metadata"]["uid"])
    except ClusterError:
        return None
