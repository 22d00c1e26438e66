"""The Secret of each engine revision: it is never read, so only a pod shows that it is missing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.operator.reconcile.conftest import Cluster


def test_a_lost_secret_is_made_again(running: Cluster) -> None:
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
    running.round()
    assert running.secrets == {secret}


def test_a_deleted_secret_is_there_again_for_the_next_pod_that_starts(running: Cluster) -> None:
    running.secrets.clear()
    running.touched.clear()
    running.round()
    assert (running.secrets, running.touched) == (set(), []), "the operator does not see it"
    running.pods.popitem()
    running.run_deployments(ready=0)
    running.round(ready=0)
    assert running.secrets == running.secrets_read()
    running.secrets.clear()
    running.round()
    assert (running.secrets, running.touched) == (set(), []), "a pod begins once"


def test_a_secret_that_went_with_its_revision_is_made_again(running: Cluster) -> None:
    (revision,) = running.deployments()
    running.remove("ControllerRevision", revision)
    running.secrets.clear()
    running.settle()
    assert running.secrets == running.secrets_read()
    assert running.deployments() == {revision: 2}


@pytest.mark.parametrize("answer", ["failures", "delayed"])
def test_a_secret_that_was_refused_is_tried_again(cluster: Cluster, answer: str) -> None:
    cluster.round()
    cluster.round()
    (secret,) = cluster.secrets
    setattr(cluster, answer, {("Secret", secret): "exceeded quota: secrets"})
    cluster.secrets.clear()
    cluster.round()
    assert cluster.secrets == {secret}


def test_engines_of_a_kept_revision_have_the_secret_that_its_template_names(
    running: Cluster,
) -> None:
    """A name of an earlier version: a changed name restarts no pods."""
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
