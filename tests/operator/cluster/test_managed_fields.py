"""Fields are taken over, except fields of the status, and their former managers are returned."""

from __future__ import annotations

from typing import Any

from goodput_operator.kube.managed_fields import Conflict, take_over


def entry(manager: str, fields: dict[str, Any], **more: str) -> dict[str, Any]:
    return {
        "manager": manager,
        "operation": "Update",
        "apiVersion": "v1",
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
        **more,
    }


def service(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"managedFields": list(entries)}}


OURS = entry(
    "us", {"f:spec": {"f:type": {}, "f:ports": {'k:{"port":80}': {".": {}}}}}, operation="Apply"
)


def test_taken_over_fields_are_ours_and_named_in_the_servers_notation() -> None:
    theirs = {
        "f:metadata": {"f:labels": {"f:team": {}}},
        "f:spec": {
            "f:ports": {
                'k:{"port":8080,"protocol":"TCP"}': {".": {}, "f:port": {}, "f:name": {}},
            },
            "f:finalizers": {'v:"x"': {}},
        },
    }
    taken, entries = take_over(service(OURS, entry("kubectl-patch", theirs)), "us")
    assert taken == (
        Conflict(manager="kubectl-patch", field=".metadata.labels.team"),
        Conflict(manager="kubectl-patch", field='.spec.ports[port=8080,protocol="TCP"]'),
        Conflict(manager="kubectl-patch", field='.spec.finalizers[="x"]'),
    )
    (ours,) = entries
    assert (ours["manager"], ours["operation"]) == ("us", "Apply")
    assert ours["fieldsV1"] == {
        "f:spec": {
            "f:type": {},
            "f:ports": {
                'k:{"port":80}': {".": {}},
                'k:{"port":8080,"protocol":"TCP"}': {".": {}, "f:port": {}, "f:name": {}},
            },
            "f:finalizers": {'v:"x"': {}},
        },
        "f:metadata": {"f:labels": {"f:team": {}}},
    }


def test_fields_of_the_status_are_not_taken_over() -> None:
    controller = entry(
        "kube-controller-manager",
        {"f:metadata": {"f:annotations": {"f:revision": {}}}, "f:status": {"f:replicas": {}}},
        subresource="status",
    )
    scaled = entry("kubectl", {"f:spec": {"f:replicas": {}}}, subresource="scale")
    taken, entries = take_over(service(OURS, scaled, controller), "us")
    assert taken == (Conflict(manager="kubectl", field=".spec.replicas"),)
    assert entries[1:] == [controller]


def test_an_object_without_other_managers_needs_no_change() -> None:
    taken, (ours,) = take_over(service(OURS), "us")
    assert taken == ()
    assert ours["fieldsV1"] == OURS["fieldsV1"]
