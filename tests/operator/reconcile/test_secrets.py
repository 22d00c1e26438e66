"""The Secrets of engine revisions: they are never read, so only pods show a missing one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.operator.reconcile.conftest import Cluster


def test_a_missing_secret_is_created_again(running: Cluster) -> None:
    running.secrets.clear()
    pod = running.engines()[0]
    (secret,) = running.secrets_read()
    message = f'secret "{secret}" not found'
    pod["status"]["containerStatuses"] = [
        {
            "name": "engine",
            "state": {"waiting": {"reason": "CreateContainerConfigError", "message": message}},
        }
    ]
    running.reconcile()
    assert running.secrets == {secret}


def test_a_deleted_secret_is_created_again_when_a_pod_starts(running: Cluster) -> None:
    running.secrets.clear()
    running.written.clear()
    running.reconcile()
    assert (running.secrets, running.written) == (set(), []), "the operator does not observe it"
    running.pods.popitem()
    running.run_deployments(ready=0)
    running.reconcile(ready=0)
    assert running.secrets == running.secrets_read()
    running.secrets.clear()
    running.reconcile()
    assert (running.secrets, running.written) == (set(), []), "a pod starts once"


def test_a_secret_deleted_with_its_revision_is_created_again(running: Cluster) -> None:
    (revision,) = running.deployments()
    running.remove("ControllerRevision", revision)
    running.secrets.clear()
    running.settle()
    assert running.secrets == running.secrets_read()
    assert running.deployments() == {revision: 2}


@pytest.mark.parametrize("field", ["failures", "delayed"])
def test_a_rejected_secret_is_created_again(cluster: Cluster, field: str) -> None:
    cluster.reconcile()
    cluster.reconcile()
    (secret,) = cluster.secrets
    setattr(cluster, field, {("Secret", secret): "exceeded quota: secrets"})
    cluster.secrets.clear()
    cluster.reconcile()
    assert cluster.secrets == {secret}


def test_a_stored_revision_keeps_the_secret_that_its_template_names(
    running: Cluster,
) -> None:
    """The name may be that of an earlier version, and no pod is restarted."""
    (revision,) = running.deployments()
    (secret,) = running.secrets
    for key in (("ControllerRevision", revision), ("Deployment", revision)):
        text = json.dumps(running.objects[key])
        running.objects[key] = json.loads(text.replace(f'"{secret}"', '"as-it-was"'))
    pods = set(running.pods)
    running.restart_operator()
    running.settle()
    assert running.secrets == {secret, "as-it-was"}
    assert running.secrets_read() == {"as-it-was"}
    assert set(running.pods) == pods
