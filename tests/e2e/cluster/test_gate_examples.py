"""A real API server accepts the Jobs of examples/gate, and admits their pods as restricted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.handle import ClusterHandle

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "gate"


def jobs() -> Iterator[Any]:
    """Return the Jobs of all files, and those that Argo Rollouts creates for a metric."""
    for path in sorted(EXAMPLES.iterdir()):
        for one in yaml.safe_load_all(path.read_text("utf-8")):
            if one.get("kind") == "Job":
                yield pytest.param(one["spec"], id=path.stem)
            if one.get("kind") == "AnalysisTemplate":
                for metric in one["spec"]["metrics"]:
                    if "job" in metric["provider"]:
                        yield pytest.param(metric["provider"]["job"]["spec"], id=path.stem)


@pytest.mark.parametrize("spec", list(jobs()))
def test_a_job_and_its_restricted_pod_are_accepted(
    spec: dict[str, Any], cluster: ClusterHandle, namespace: str
) -> None:
    cluster.kubectl("label", "ns", namespace, "pod-security.kubernetes.io/enforce=restricted")
    job = {"apiVersion": "batch/v1", "kind": "Job", "spec": spec}
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": spec["template"]["spec"]}
    for resource in (job, pod):
        resource["metadata"] = {"name": "gate", "namespace": namespace}
        cluster.apply(resource, "--dry-run=server", "--validate=strict")
