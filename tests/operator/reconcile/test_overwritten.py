"""Edits by other managers: rendered fields are reset, additions to pod templates are removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from goodput_operator.kube.managed_fields import Conflict
from goodput_operator.reconcile.actions import Apply, Decision

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.operator.reconcile.conftest import Cluster

POD_SPEC = ("f:spec", "f:template", "f:spec")


def owned(manager: str, fields: dict[str, Any], **more: str) -> dict[str, Any]:
    """An entry of `managedFields`."""
    entry = {"manager": manager, "operation": "Update", "apiVersion": "apps/v1"}
    return {**entry, **more, "fieldsType": "FieldsV1", "fieldsV1": fields}


def edit(
    cluster: Cluster, name: str, change: Callable[[dict[str, Any]], object], entry: dict[str, Any]
) -> None:
    """Edit a Deployment as another manager, with its entry in `managedFields`."""

    def edited(body: dict[str, Any]) -> None:
        change(body)
        body["metadata"].setdefault("managedFields", []).append(entry)

    cluster.edit("Deployment", name, edited)


def applies(decision: Decision) -> list[Apply]:
    return [action for action in decision.actions if isinstance(action, Apply)]


def test_a_child_scaled_by_hand_is_reset_with_manager_and_field_reported(running: Cluster) -> None:
    (name,) = running.deployments()
    # `kubectl scale` writes the scale subresource; the next apply then meets no conflict.
    entry = owned("kubectl", {"f:spec": {"f:replicas": {}}}, subresource="scale")
    edit(running, name, lambda body: body["spec"].update(replicas=5), entry)
    (apply,) = applies(running.decide())
    assert apply.overwrites == (Conflict(manager="kubectl", field=".spec.replicas"),)
    assert apply.take_over == (), "a forced apply resets a rendered field"
    assert running.deployments() == {name: 2}


def test_our_own_change_of_a_shared_field_is_not_reported_as_overwritten(
    running: Cluster,
) -> None:
    (name,) = running.deployments()
    entry = owned("kubectl", {"f:spec": {"f:replicas": {}}}, subresource="scale")
    edit(running, name, lambda body: None, entry)
    assert applies(running.decide()) == [], "the value is ours"
    running.update_spec(replicas=3)
    changed = applies(running.decide())
    assert name in [apply.body["metadata"]["name"] for apply in changed]
    assert [apply.overwrites for apply in changed] == [()] * len(changed)


ADDITIONS = {
    "a node selector": (
        lambda pod: pod.update(nodeSelector={"disk": "ssd"}),
        {"f:nodeSelector": {}},
        ".nodeSelector",
    ),
    "a variable": (
        lambda pod: pod["containers"][0]["env"].append({"name": "X", "value": "1"}),
        {
            "f:containers": {
                'k:{"name":"engine"}': {
                    "f:env": {'k:{"name":"X"}': {".": {}, "f:name": {}, "f:value": {}}}
                }
            }
        },
        '.containers[name="engine"].env[name="X"]',
    ),
    "a sidecar": (
        lambda pod: pod["containers"].append({"name": "mesh", "image": "mesh"}),
        {"f:containers": {'k:{"name":"mesh"}': {".": {}, "f:image": {}, "f:name": {}}}},
        '.containers[name="mesh"]',
    ),
}


@pytest.mark.parametrize(("change", "fields", "path"), ADDITIONS.values(), ids=ADDITIONS.keys())
def test_a_field_added_to_a_pod_template_by_hand_is_removed_and_reported(
    running: Cluster, change: Callable[[Any], object], fields: dict[str, Any], path: str
) -> None:
    (name,) = running.deployments()
    entry = owned("kubectl-set", {"f:spec": {"f:template": {"f:spec": fields}}})
    edit(running, name, lambda body: change(body["spec"]["template"]["spec"]), entry)
    (apply,) = applies(running.decide())
    assert apply.body["metadata"]["name"] == name
    assert apply.overwrites == (
        Conflict(manager="kubectl-set", field=f".spec.template.spec{path}"),
    )
    assert POD_SPEC in apply.take_over


def test_a_restart_by_kubectl_and_fields_without_an_owner_stay(running: Cluster) -> None:
    (name,) = running.deployments()

    def restarted(body: dict[str, Any]) -> None:
        template = body["spec"]["template"]
        template["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] = "now"
        # Admission webhooks leave no entry in `managedFields`.
        template["spec"]["containers"].append({"name": "injected", "image": "mesh"})

    annotations: dict[str, Any] = {"f:annotations": {"f:kubectl.kubernetes.io/restartedAt": {}}}
    entry = owned("kubectl-rollout", {"f:spec": {"f:template": {"f:metadata": annotations}}})
    edit(running, name, restarted, entry)
    for _ in range(3):
        assert applies(running.reconcile()) == []


def test_fields_added_outside_of_the_pod_template_stay(running: Cluster) -> None:
    (name,) = running.deployments()
    entry = owned("kubectl-label", {"f:metadata": {"f:labels": {"f:team": {}}}})
    edit(running, name, lambda body: body["metadata"]["labels"].update(team="x"), entry)
    for _ in range(3):
        assert applies(running.reconcile()) == []


def foreign_service(name: str) -> dict[str, Any]:
    metadata = {"name": name, "labels": {}, "ownerReferences": []}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {}}


@pytest.mark.parametrize("name", ["chat", "chat-engines"])
def test_a_service_without_a_route_is_not_ready(running: Cluster, name: str) -> None:
    running.remove("Service", name)
    running.put(foreign_service(name))
    running.reconcile()
    assert running.condition("Ready") == ("False", "NameConflict")
    assert f"Service {name}" in running.message("Ready")
    assert "NameConflict" in [event.reason for event in running.events if event.warning]
    running.remove("Service", name)
    running.settle()
    assert running.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("name", ["chat", "chat-engines"])
def test_a_service_without_a_route_is_not_ready_with_an_invalid_spec(
    running: Cluster, name: str
) -> None:
    running.remove("Service", name)
    running.put(foreign_service(name))
    running.update_spec(engine={"policy": "magic"})
    running.settle()
    assert running.condition("Stalled") == ("True", "InvalidSpec")
    assert running.condition("Ready") == ("False", "NameConflict")
    assert f"Service {name}" in running.message("Ready")
    running.remove("Service", name)
    running.reconcile()
    assert running.condition("Ready") == ("True", "Serving")


def test_a_foreign_object_that_carries_no_requests_leaves_a_service_ready(
    running: Cluster,
) -> None:
    running.remove("PodDisruptionBudget", "chat-engines")
    running.put({**foreign_service("chat-engines"), "kind": "PodDisruptionBudget"})
    running.reconcile()
    assert running.condition("Stalled") == ("True", "NameConflict")
    assert running.condition("Ready") == ("True", "Serving")
