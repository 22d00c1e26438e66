"""Who may do what with services: by the cluster's own roles, which the chart's are added to."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.operator.installed import Installed

READ = ("get", "list", "watch")
WRITE = ("create", "update", "patch", "delete")
VERBS = (*READ, *WRITE, "deletecollection")
RESOURCES = ("llmservices", "llmservices/scale", "llmservices/status")
STATUS = ("llmservices/status", "get")
GRANTED = {
    "view": {*product(["llmservices"], READ), STATUS},
    "edit": {*product(["llmservices", "llmservices/scale"], READ + WRITE), STATUS},
    "admin": {*product(["llmservices", "llmservices/scale"], VERBS), STATUS},
}


def granted(installed: Installed, user: str, *namespaces: str) -> set[tuple[str, str, str]]:
    """What a user may do with services where, as `kubectl auth can-i` asks, and all at once."""
    asked = list(product(namespaces, RESOURCES, VERBS))
    reviews = []
    for namespace, resource, verb in asked:
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
    said = installed.cluster.kubectl(
        *("create", "-f", "-", "-o", "jsonpath={.status.allowed} "),
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews}),
    )
    return {one for one, allowed in zip(asked, said.split(), strict=True) if allowed == "true"}


@pytest.mark.parametrize("role", GRANTED)
def test_a_role_of_the_cluster_covers_services_and_no_more_of_them_than_its_name_says(
    installed: Installed, namespace: str, until: Callable[..., Any], role: str
) -> None:
    user = f"{role}er-of-{namespace}"
    bind = ("create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}")
    installed.cluster.kubectl(*bind, "-n", namespace)
    wanted = {(namespace, *right) for right in GRANTED[role]}

    def covered() -> set[tuple[str, str, str]] | None:
        found = granted(installed, user, namespace, installed.namespace)
        return found if found >= wanted else None

    # The cluster puts its roles together a moment after a part has come.
    assert until(covered, "the role covers services") == wanted, "nothing else, and nowhere else"
