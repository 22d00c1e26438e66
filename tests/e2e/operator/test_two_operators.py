"""Two operators from one chart in their own namespace: one writes, the other one takes over.

They share a service account. The audit log names the pod behind each token. The last test deletes
the namespace with everything in it.
"""

from __future__ import annotations

import signal
import time
import uuid
from datetime import datetime
from typing import TYPE_CHECKING

import pytest
from tools.cluster.handle import ClusterError, wait_for
from tools.cluster.installing import install_chart, uninstall_chart
from tools.e2e.installation import OPERATOR_PODS, ChartRelease

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.cluster.handle import ClusterHandle

TAKEOVER_S = 30
DELETION_S = 60
# A token takes the emulated device about 10 ms.
TOKENS_OF_MINUTES = 12_000


@pytest.fixture(scope="module")
def two(
    cluster: ClusterHandle, no_other_operator: None, crd: None, images: tuple[str, ...]
) -> Iterator[ChartRelease]:
    """A namespace with two operators and nothing outside it."""
    namespace = f"two-operators-{uuid.uuid4().hex[:8]}"
    # The aggregated roles belong to the installation of the other tests.
    values = f"replicas=2,crds.install=false,rbac.aggregate=false,watchNamespaces={{{namespace}}}"
    install_chart(cluster, *images, "--set", values, namespace=namespace)
    two = ChartRelease(cluster=cluster, namespace=namespace)
    yield two
    two.forwards.close()
    cluster.kubectl("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")


def writes(two: ChartRelease) -> list[tuple[str, float]]:
    """Return the pod and the time of each write except those of the Lease, by the audit log."""
    return [
        (
            line["user"]["extra"]["authentication.kubernetes.io/pod-name"][0],
            datetime.fromisoformat(line["stageTimestamp"]).timestamp(),
        )
        for line in two.audited_requests()
        if line["verb"] in {"create", "patch", "delete"}
        and line["objectRef"]["resource"] != "leases"
        and line["responseStatus"]["code"] < 300
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("own_cluster")
def test_one_of_two_operators_writes_and_the_other_takes_over_when_it_dies(
    two: ChartRelease,
) -> None:
    def change_budget(budget: int) -> None:
        """Change the spec, and wait until the operator has written the status."""
        two.patch("chat", engine={"tokenBudget": {"initial": budget}})
        wait_for(lambda: two.status("chat")["tokenBudget"] == budget, f"a budget of {budget}")

    two.apply("chat", suspend=True)
    wait_for(lambda: two.status("chat"), "a status")
    for budget in (1024, 1088, 1152):
        change_budget(budget)
    [one] = {pod for pod, _ in writes(two)}
    assert two.get("lease", "goodput")["spec"]["holderIdentity"].startswith(f"{one}_")
    assert len(two.get(*OPERATOR_PODS)["items"]) == 2

    # Suspended, the operator cannot react to SIGTERM, so the node kills it.
    for process in two.own.processes_of(one):
        process.send_signal(signal.SIGSTOP)
    died = time.time()
    two.kubectl("delete", f"pod/{one}", "--grace-period=1")
    change_budget(1216)
    written = writes(two)
    others = {pod for pod, _ in written if pod != one}
    assert len(others) == 1, "the standby or its replacement, but never both"
    pods_in_order = [pod for pod, _ in written]
    assert pods_in_order == sorted(pods_in_order, key=[one, *others].index), "never alternating"
    assert min(at for pod, at in written if pod != one) - died < TAKEOVER_S


@pytest.mark.slow
def test_a_namespace_with_running_requests_is_deleted_within_a_minute_without_an_operator(
    two: ChartRelease,
) -> None:
    two.apply("busy", replicas=1)
    two.wait_settled("busy")
    streams = two.start_streams("busy", 4, TOKENS_OF_MINUTES)
    uninstall_chart(two.cluster, namespace=two.namespace)
    assert streams.running(), "the service continues without an operator"
    began = time.monotonic()
    delete = ("delete", "namespace", two.namespace, f"--timeout={DELETION_S}s")
    two.cluster.kubectl(*delete, timeout_s=DELETION_S + 10)
    assert time.monotonic() - began < DELETION_S
    outcomes = streams.outcomes()
    assert "done" not in outcomes, "no request had time to finish"
    assert set(outcomes) <= {"draining", "replica_lost"}, "each has an error code"
    with pytest.raises(ClusterError, match="NotFound"):
        two.cluster.get("namespace", two.namespace)
