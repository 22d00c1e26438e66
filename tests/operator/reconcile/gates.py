"""The gate of the tests of gated rollouts: its spec, its verdicts, and its course."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from goodput_core.replay_job import ABResult, encode_message
from goodput_core.slo.verdict import VerdictKind

if TYPE_CHECKING:
    from tests.operator.reconcile.conftest import Cluster

GATE: dict[str, Any] = {
    "trace": "pvc://traces/prod.parquet",
    "window": {"startSeconds": 600, "endSeconds": 900},
    "margin": "2%",
    "records": "pvc://runs/gates",
}
PASS, FAIL, INCONCLUSIVE, INVALID = (
    encode_message(
        ABResult(
            verdict=verdict,
            reason=reason,
            message=f"{verdict.value} of a.",
            pairs=4,
            interval="a: −0.10 points (−0.40 … +0.20)",
        )
    )
    for verdict, reason in (
        (VerdictKind.PASS, "Attained"),
        (VerdictKind.FAIL, "WorseThanBaseline"),
        (VerdictKind.INCONCLUSIVE, "IntervalSpansMargin"),
        (VerdictKind.INVALID, "InvalidRun"),
    )
)
ERROR = encode_message(
    ABResult(reason="Error", message="/var/lib/goodput/claims/traces/x.parquet: no such file")
)
TRIAL_ROLES = ("baseline", "candidate")
RETRY = "goodput.dev/retry"


def trials(cluster: Cluster) -> dict[str, dict[str, int]]:
    return {role: cluster.deployments(role) for role in TRIAL_ROLES}


def gate_of(cluster: Cluster) -> dict[str, Any]:
    gate: dict[str, Any] = cluster.status.get("gate", {})
    return gate


def until_job(cluster: Cluster) -> dict[str, Any]:
    """Reconcile until the Job of the gate runs."""
    for _ in range(12):
        cluster.reconcile()
        if len(cluster.jobs()) == 1 and gate_of(cluster)["phase"] == "Replaying":
            return cluster.jobs()[0]
    raise AssertionError(gate_of(cluster))


def change(cluster: Cluster, policy: str = "sarathi") -> None:
    cluster.update_spec(engine={"policy": policy})


def judge(cluster: Cluster, message: str, policy: str = "sarathi") -> None:
    """Change the service, end its gate with a message, and settle."""
    change(cluster, policy)
    until_job(cluster)
    cluster.end_job(message)
    cluster.settle()


def delete_pod(cluster: Cluster, role: str) -> None:
    for name, pod in list(cluster.pods.items()):
        if pod["metadata"]["labels"]["goodput.dev/role"] == role:
            del cluster.pods[name]
            return
