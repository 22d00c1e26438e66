"""Objects of a service that another client edits or deletes are restored.

An `Overwritten` Event names the client's field manager and the field. Objects of other owners are
not changed, even if the service needs their names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from tools.cluster.handle import ClusterError, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.e2e.installation import ChartRelease


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One change by hand.

    Args:
        kind, name: the edited object; REVISION stands for the revision's name.
        patch: a merge patch, or the steps of a JSON patch.
        message: message of the Event.
    """

    kind: str
    name: str
    patch: Any
    message: str


def replaced(path: str, value: object) -> list[dict[str, object]]:
    """Return a JSON patch that replaces one value."""
    return [{"op": "replace", "path": path, "value": value}]


EDITS = {
    "the replicas of the engines": Edit(
        kind="deployment",
        name="REVISION",
        patch={"spec": {"replicas": 3}},
        message="Deployment REVISION {back} .spec.replicas",
    ),
    "an engine's image": Edit(
        kind="deployment",
        name="REVISION",
        patch=replaced("/spec/template/spec/containers/0/image", "example.test/other:1"),
        message='Deployment REVISION {back} .spec.template.spec.containers[name="engine"].image',
    ),
    # An apply alone would add our entry beside this one, and the API server rejects both together.
    "a Service's port": Edit(
        kind="service",
        name="edited",
        patch=replaced("/spec/ports/0/port", 8080),
        message='Service edited {back} .spec.ports[port=8080,protocol="TCP"]',
    ),
    "an added label in a selector": Edit(
        kind="service",
        name="edited-engines",
        patch={"spec": {"selector": {"track": "canary"}}},
        message="Service edited-engines {back} .spec.selector",
    ),
    "another rule of a disruption budget": Edit(
        kind="poddisruptionbudget",
        name="edited-engines",
        patch={"spec": {"maxUnavailable": None, "minAvailable": "100%"}},
        message="PodDisruptionBudget edited-engines {back} .spec.minAvailable",
    ),
    "the stored limits": Edit(
        kind="configmap",
        name="edited-config",
        patch={"data": {"limits.json": "{}"}},
        message="ConfigMap edited-config {back} .data.limits.json",
    ),
    "the label that the operator selects by": Edit(
        kind="role",
        name="edited-router",
        patch={"metadata": {"labels": {"goodput.dev/llmservice": "another"}}},
        message="Role edited-router {back} .metadata.labels.goodput.dev/llmservice",
    ),
}
BACK = 'was reset to its LLMService: "another-client" had set'


@pytest.fixture(scope="module")
def edited(installation: ChartRelease) -> Iterator[str]:
    """The revision of a service whose objects the tests of this module edit."""
    installation.apply("edited", replicas=1)
    installation.wait_settled("edited")
    yield str(installation.status("edited")["currentRevision"])
    installation.kubectl("delete", "llmservice", "edited")


def overwritten(installation: ChartRelease, service: str) -> set[str]:
    selector = f"involvedObject.name={service},reason=Overwritten"
    events = installation.get("events", "--field-selector", selector)["items"]
    return {event["message"] for event in events}


@pytest.mark.slow
def test_an_edited_field_is_reset_and_an_event_names_the_field_and_its_manager(
    installation: ChartRelease, edited: str
) -> None:
    def patch(where: tuple[str, str], patch: Any) -> None:
        how = "json" if isinstance(patch, list) else "merge"
        by = ("--field-manager=another-client", f"--type={how}", "-p", json.dumps(patch))
        installation.kubectl("patch", *where, *by)

    patch(("configmap", "edited-config"), {"data": {"theirs": "a field of another manager"}})
    for number, (name, edit) in enumerate(EDITS.items(), start=1):
        where = (edit.kind, edit.name.replace("REVISION", edited))
        before = installation.get(*where)
        patch(where, edit.patch)
        message = edit.message.replace("REVISION", edited).format(back=BACK)
        # One by one: two edits that the operator finds together are one Event.
        wait_for(lambda: message in overwritten(installation, "edited"), message)  # noqa: B023
        assert desired_part(installation.get(*where)) == desired_part(before), name
        assert len(overwritten(installation, "edited")) == number, "no other Event"
    assert "theirs" in installation.get("configmap", "edited-config")["data"]
    installation.wait_settled("edited")
    assert installation.status("edited")["summary"]["replicas"] == "1/1"
    assert installation.condition("edited", "Stalled")[0] == "Unhindered"


def desired_part(body: dict[str, Any]) -> dict[str, Any]:
    """Return an object without its status and the fields that controllers update."""
    stamps = {"resourceVersion", "generation", "managedFields"}
    metadata = {k: v for k, v in body["metadata"].items() if k not in stamps}
    # The Deployment's controller numbers the templates.
    annotations = {k: v for k, v in metadata["annotations"].items() if "deployment" not in k}
    kept = {k: v for k, v in body.items() if k != "status"}
    return {**kept, "metadata": {**metadata, "annotations": annotations}}


@pytest.mark.slow
def test_deleted_objects_are_recreated(installation: ChartRelease, edited: str) -> None:
    deleted = {
        "poddisruptionbudget": "edited-engines",
        "service": "edited",
        "serviceaccount": "edited-router",
        "deployment": "edited-router",
    }
    before = {kind: uid_of(installation, kind, name) for kind, name in deleted.items()}
    for kind, name in deleted.items():
        installation.kubectl("delete", kind, name, "--wait=false")
    for kind, name in deleted.items():
        wait_for(
            lambda: uid_of(installation, kind, name) not in {before[kind], None},  # noqa: B023
            f"another {kind} {name}",
        )
    installation.wait_settled("edited")


@pytest.mark.slow
def test_a_deleted_secret_is_recreated_before_the_next_engine_starts(
    installation: ChartRelease, edited: str
) -> None:
    # The operator has no permission to read it, and a running engine no longer needs it.
    of_revision = ("secret", "-l", f"goodput.dev/revision={edited}")
    [secret] = installation.get(*of_revision)["items"]
    installation.kubectl("delete", "secret", secret["metadata"]["name"])
    [engine] = installation.pods("edited", "engine")
    installation.kill_pod(engine["metadata"]["name"])
    installation.wait("create", f"secret/{secret['metadata']['name']}")
    installation.wait_settled("edited")


@pytest.mark.slow
def test_objects_of_another_owner_with_the_needed_names_stall_the_service(
    installation: ChartRelease, apply_service: Callable[..., None]
) -> None:
    theirs = ("service/hindered-engines", "configmap/hindered-config")
    installation.kubectl("create", "service", "clusterip", "hindered-engines", "--tcp=80")
    # Without a common field, a server-side apply would succeed and share the object.
    installation.kubectl("create", "configmap", "hindered-config")
    before = [installation.get(one) for one in theirs]
    apply_service("hindered", replicas=1, control={"mode": "Manual", "intervalSeconds": 2})
    installation.wait("condition=Stalled", "llmservice/hindered")
    reason, message = installation.condition("hindered", "Stalled")
    assert reason == "NameConflict"
    assert "Service hindered-engines" in message
    assert "ConfigMap hindered-config" in message
    assert [installation.get(one) for one in theirs] == before, "unchanged"
    installation.kubectl("delete", *theirs)
    installation.wait_settled("hindered")
    installation.wait("condition=Stalled=false", "llmservice/hindered")


def uid_of(installation: ChartRelease, kind: str, name: str) -> str | None:
    try:
        return str(installation.get(kind, name)["metadata"]["uid"])
    except ClusterError:
        return None
