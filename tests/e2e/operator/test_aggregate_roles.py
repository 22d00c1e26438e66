"""Permissions on services that the chart adds to the cluster roles view, edit and admin."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING

import pytest
from tools.cluster.handle import wait_for

if TYPE_CHECKING:
    from tools.e2e.installation import ChartRelease

READ = ("get", "list", "watch")
WRITE = ("create", "update", "patch", "delete")
VERBS = (*READ, *WRITE, "deletecollection")
KINDS = ("llmservices", "tracereplays")
RESOURCES = (*KINDS, "llmservices/scale", "llmservices/status", "tracereplays/status")
STATUS = tuple((f"{kind}/status", "get") for kind in KINDS)
GRANTED = {
    "view": {*product(KINDS, READ), *STATUS},
    "edit": {*product([*KINDS, "llmservices/scale"], READ + WRITE), *STATUS},
    "admin": {*product([*KINDS, "llmservices/scale"], VERBS), *STATUS},
}


def permissions(
    installation: ChartRelease, user: str, *namespaces: str
) -> set[tuple[str, str, str]]:
    """Return a user's permissions on services as (namespace, resource, verb)."""
    questions = list(product(namespaces, RESOURCES, VERBS))
    reviews = []
    for namespace, resource, verb in questions:
        name, _, subresource = resource.partition("/")
        attributes = {
            "group": "goodput.dev",
            "resource": name,
            "subresource": subresource,
            "verb": verb,
            "namespace": namespace,
        }
        reviews.append(
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": user, "resourceAttributes": attributes},
            }
        )
    output = installation.cluster.kubectl(
        *("create", "-f", "-", "-o", "jsonpath={.status.allowed} "),
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews}),
    )
    allowed = zip(questions, output.split(), strict=True)
    return {permission for permission, answer in allowed if answer == "true"}


@pytest.mark.parametrize("role", GRANTED)
def test_a_cluster_role_grants_exactly_its_permissions_on_services(
    installation: ChartRelease, namespace: str, role: str
) -> None:
    user = f"{role}er-of-{namespace}"
    bind = ("create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}")
    installation.cluster.kubectl(*bind, "-n", namespace)
    expected = {(namespace, *right) for right in GRANTED[role]}

    def granted() -> set[tuple[str, str, str]] | None:
        found = permissions(installation, user, namespace, installation.namespace)
        return found if found >= expected else None

    # The cluster aggregates roles a moment after a part was created.
    assert wait_for(granted, "the role covers services") == expected, "no more, in no other place"
