"""Two operators from one chart, in a namespace of their own: one writes, the other takes over.

They share a service account; the API server's record names the pod behind each token. In the end
the namespace goes, with all that is in it.
"""

from __future__ import annotations

import json
import signal
import time
import uuid
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
from tests.e2e.operator.installed import Installed
from tools.cluster.handle import ClusterError
from tools.cluster.installing import install_chart, uninstall_chart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.cluster.handle import Cluster

TAKEOVER_S = 30
GONE_S = 60
# A token takes the emulated device about a hundredth of a second.
MINUTES = 12_000


@pytest.fixture(scope="module")
def two(
    cluster: Cluster, unattended: None, crd: None, images: tuple[str, ...]
) -> Iterator[Installed]:
    """A namespace with two operators, nothing of which is outside it."""
    namespace = f"two-operators-{uuid.uuid4().hex[:8]}"
    # The cluster's own roles belong to the installation of the other tests.
    values = f"replicas=2,crds.install=false,rbac.aggregate=false,watchNamespaces={{{namespace}}}"
    install_chart(cluster, *images, "--set", values, namespace=namespace)
    two = Installed(cluster=cluster, namespace=namespace)
    yield two
    two.forwards.close()
    cluster.kubectl("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")


def writes(two: Installed) -> list[tuple[str, float]]:
    """Which pod wrote something beside its Lease, and when, in the API server's own record."""
    return [
        (
            line["user"]["extra"]["authentication.kubernetes.io/pod-name"][0],
            datetime.fromisoformat(line["stageTimestamp"]).timestamp(),
        )
        for line in two.audited()
        if line["verb"] in {"create", "patch", "delete"}
        and line["objectRef"]["resource"] != "leases"
        and line["responseStatus"]["code"] < 300
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("own_cluster")
def test_of_two_operators_one_writes_and_the_other_takes_over_when_it_dies(
    two: Installed, until: Callable[..., Any]
) -> None:
    def told(budget: int) -> None:
        """Ask for something, and wait until it is written."""
        spec = {"engine": {"tokenBudget": {"initial": budget}}}
        two.kubectl("patch", "llmservice/chat", "--type=merge", "-p", json.dumps({"spec": spec}))
        until(lambda: two.status("chat")["tokenBudget"] == budget, f"a budget of {budget}")

    two.apply("chat", suspend=True)
    until(lambda: two.status("chat"), "somebody writes")
    for budget in (1024, 1088, 1152):
        told(budget)
    [one] = {pod for pod, _ in writes(two)}
    assert two.get("lease", "goodput")["spec"]["holderIdentity"].startswith(f"{one}_")
    pods = two.get("pods", "-l", "app.kubernetes.io/name=goodput-operator")["items"]
    assert len(pods) == 2

    # Held still it does not hear that it is asked to end; then the node kills it.
    for process in two.own.processes_of(one):
        process.send_signal(signal.SIGSTOP)
    died = time.time()
    two.kubectl("delete", f"pod/{one}", "--grace-period=1")
    told(1216)
    written = writes(two)
    others = {pod for pod, _ in written if pod != one}
    assert len(others) == 1, "the one that stood by, or its replacement, but never both"
    pods_in_order = [pod for pod, _ in written]
    assert pods_in_order == sorted(pods_in_order, key=[one, *others].index), "never in turns"
    assert min(at for pod, at in written if pod != one) - died < TAKEOVER_S


@pytest.mark.slow
def test_a_namespace_is_gone_within_a_minute_of_its_operator_although_answers_run(
    two: Installed,
) -> None:
    two.apply("busy", replicas=1)
    two.settled("busy")
    answers = two.answering("busy", 4, MINUTES)
    uninstall_chart(two.cluster, namespace=two.namespace)
    assert answers.running(), "it goes on without an operator"
    began = time.monotonic()
    delete = ("delete", "namespace", two.namespace, f"--timeout={GONE_S}s")
    two.cluster.kubectl(*delete, timeout_s=GONE_S + 10)
    assert time.monotonic() - began < GONE_S
    ends = answers.ends()
    assert "done" not in ends, "none had the time to finish"
    assert set(ends) <= {"draining", "replica_lost"}, "each was told why"
    with pytest.raises(ClusterError, match="NotFound"):
        two.cluster.get("namespace", two.namespace)
