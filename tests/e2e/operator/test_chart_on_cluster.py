"""The chart in a cluster: what it renders is taken and answers, upgrades leave services alone.

The earlier chart lies in tests/charts/earlier, made by

    git archive --prefix=goodput/ COMMIT:charts/goodput | gzip -n > goodput-COMMIT.tgz

rather than taken from the history, which a shallow clone lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.e2e.operator.installed import Installed
from tools.cluster.handle import ClusterError
from tools.cluster.installing import (
    CHART,
    install_chart,
    rendered_chart,
    run_chart_tests,
    uninstall_chart,
)
from tools.cluster.starting import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.cluster.handle import Cluster

EARLIER = ROOT / "tests" / "charts" / "earlier" / "goodput-6833dd7.tgz"
EXAMPLES = CHART / "examples"
VALUES = {
    "default": [],
    "kind": ["--values", str(EXAMPLES / "kind.yaml")],
    # Monitors are of kinds that the Prometheus operator brings.
    "gpu": [
        *("--values", str(EXAMPLES / "gpu.yaml")),
        *("--set", "metrics.serviceMonitor.enabled=false,metrics.podMonitor.enabled=false"),
    ],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_api_server_takes_all_that_the_chart_renders(
    cluster: Cluster, namespace: str, values: list[str]
) -> None:
    said = cluster.apply(
        rendered_chart(cluster, *values, namespace=namespace),
        *("--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict"),
    )
    kinds = {line.partition("/")[0].partition(".")[0] for line in said.splitlines()}
    assert {"customresourcedefinition", "deployment", "clusterrole", "role", "secret"} <= kinds


def test_the_api_server_refuses_a_field_that_it_does_not_know(
    cluster: Cluster, namespace: str
) -> None:
    text = rendered_chart(cluster, namespace=namespace)
    text = text.replace("terminationGracePeriodSeconds", "terminationGraceSeconds")
    with pytest.raises(ClusterError, match="terminationGraceSeconds"):
        cluster.apply(text, "--server-side", "--dry-run=server", "--validate=strict")


def test_the_charts_own_test_passes_against_the_installed_release(installed: Installed) -> None:
    said = run_chart_tests(installed.cluster, namespace=installed.namespace)
    assert "Phase:          Succeeded" in said


def settings(namespace: str, *images: str) -> tuple[str, ...]:
    values = f"verbose=true,rbac.aggregate=false,watchNamespaces={{{namespace}}}"
    return (*images, "--set", values)


@pytest.fixture
def earlier(
    cluster: Cluster,
    unattended: None,
    crd_is_ours: bool,
    images: tuple[str, ...],
    namespace: str,
) -> Iterator[Installed]:
    """The operator from the earlier chart, its custom resource definition included."""
    if not crd_is_ours:
        pytest.skip("the given cluster has a definition, which would be an earlier one for a while")
    # The definition is there already, from this checkout and as kubectl's.
    install_chart(
        cluster,
        *("--take-ownership", "--force-conflicts", *settings(namespace, *images)),
        chart=EARLIER,
        namespace=namespace,
    )
    yield Installed(cluster=cluster, namespace=namespace)
    uninstall_chart(cluster, namespace=namespace)


@pytest.mark.slow
def test_an_upgrade_replaces_the_operator_and_leaves_every_pod_of_a_service_alone(
    earlier: Installed, images: tuple[str, ...], until: Callable[..., Any]
) -> None:
    def pods() -> dict[str, Any]:
        """Each pod of the service: which it is, since when it is ready, how often restarted."""
        found = earlier.pods("chat", "engine") + earlier.pods("chat", "router")
        return {
            pod["metadata"]["name"]: (
                pod["metadata"]["uid"],
                next(c for c in pod["status"]["conditions"] if c["type"] == "Ready"),
                pod["status"]["containerStatuses"][0]["restartCount"],
            )
            for pod in found
        }

    def operators() -> set[str]:
        found = earlier.get("pods", "-l", "app.kubernetes.io/name=goodput-operator")["items"]
        return {pod["metadata"]["uid"] for pod in found}

    def definition_differs() -> bool:
        crd = CHART / "files" / "crd-llmservices.yaml"
        try:
            earlier.kubectl("diff", "--server-side", "--force-conflicts", "-f", str(crd))
        except ClusterError:
            return True
        return False

    earlier.apply("chat", replicas=1)
    earlier.settled("chat")
    served, before, key = pods(), operators(), earlier.get("secret", "goodput-key")["data"]
    assert len(served) == 2
    assert definition_differs(), "or the upgrade would show nothing"

    # No image has this tag: a pod that took the new default would not start.
    defaults = ("--set", "engine.tag=later,router.tag=later")
    upgraded = (*settings(earlier.namespace, *images), *defaults)
    install_chart(earlier.cluster, *upgraded, namespace=earlier.namespace)
    until(lambda: not before & operators(), "the earlier operator to be gone")
    [told] = earlier.get("deployment", "goodput")["spec"]["template"]["spec"]["containers"]
    assert sum(word.endswith(":later") for word in told["args"]) == 2

    def looked_after() -> bool:
        done = {"event": "phase", "phase": "done", "llmservice": "chat"}
        return any(done.items() <= line.items() for line in earlier.operator_log())

    until(looked_after, "the new operator's first turn")
    earlier.settled("chat")
    assert pods() == served
    assert not definition_differs()
    assert earlier.get("secret", "goodput-key")["data"] == key
