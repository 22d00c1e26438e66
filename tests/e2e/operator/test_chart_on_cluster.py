"""The chart in a cluster: the API server accepts its objects, and upgrades keep services running.

tests/charts/earlier contains an earlier chart, since a shallow clone lacks the history:

    git archive --prefix=goodput/ COMMIT:charts/goodput | gzip -n > goodput-COMMIT.tgz
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tools.cluster.handle import ClusterError, wait_for
from tools.cluster.installing import (
    CHART,
    install_chart,
    rendered_chart,
    run_chart_tests,
    uninstall_chart,
)
from tools.cluster.starting import ROOT
from tools.e2e.installation import CHAT, OPERATOR_PODS, ChartRelease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.cluster.handle import ClusterHandle

EARLIER = ROOT / "tests" / "charts" / "earlier" / "goodput-6833dd7.tgz"
EXAMPLES = CHART / "examples"
VALUES = {
    "default": [],
    "kind": ["--values", str(EXAMPLES / "kind.yaml")],
    # The Prometheus operator would define the kinds of the monitors.
    "gpu": [
        *("--values", str(EXAMPLES / "gpu.yaml")),
        *("--set", "metrics.serviceMonitor.enabled=false,metrics.podMonitor.enabled=false"),
    ],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_api_server_accepts_all_objects_of_the_chart(
    cluster: ClusterHandle, namespace: str, values: list[str]
) -> None:
    output = cluster.apply(
        rendered_chart(cluster, *values, namespace=namespace),
        *("--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict"),
    )
    kinds = {line.partition("/")[0].partition(".")[0] for line in output.splitlines()}
    assert {"customresourcedefinition", "deployment", "clusterrole", "role", "secret"} <= kinds


def test_the_api_server_rejects_an_unknown_field(cluster: ClusterHandle, namespace: str) -> None:
    text = rendered_chart(cluster, namespace=namespace)
    text = text.replace("terminationGracePeriodSeconds", "terminationGraceSeconds")
    with pytest.raises(ClusterError, match="terminationGraceSeconds"):
        cluster.apply(text, "--server-side", "--dry-run=server", "--validate=strict")


def test_the_charts_own_test_passes_against_the_installed_release(
    installation: ChartRelease,
) -> None:
    output = run_chart_tests(installation.cluster, namespace=installation.namespace)
    assert "Phase:          Succeeded" in output


def test_the_admission_policy_rejects_a_model_that_pods_cannot_get(
    installation: ChartRelease, apply_service: Callable[..., None]
) -> None:
    source = "file:///models/chat"
    manifest = CHAT.read_text(encoding="utf-8").replace("emulated://llama-3-8b-h100", source)

    def rejection() -> str:
        try:
            installation.kubectl("apply", "--dry-run=server", "-f", "-", stdin=manifest)
        except ClusterError as error:
            return str(error)
        return ""

    # The API server enforces a new policy after a moment.
    message = wait_for(rejection, "the policy is enforced")
    assert f"ValidatingAdmissionPolicy 'goodput-{installation.namespace}'" in message
    assert "spec.model.source: pods cannot read a folder" in message
    apply_service("admitted", suspend=True)
    with pytest.raises(ClusterError, match=r"spec\.model\.source: pods cannot read"):
        installation.patch("admitted", model={"source": source})
    with pytest.raises(ClusterError, match=r"spec\.model\.revision: is required for hf://"):
        installation.patch("admitted", model={"source": "hf://Qwen/Qwen3-8B"})
    model = {"source": "hf://Qwen/Qwen3-8B", "revision": "main"}
    with pytest.raises(ClusterError, match="a commit of the model, 40 hexadecimal digits"):
        installation.patch("admitted", model=model)
    commit = "b968826d9c46dd6066d109eabc6255188de91218"
    installation.patch("admitted", model={**model, "revision": commit})


def chart_options(namespace: str, *images: str) -> tuple[str, ...]:
    values = f"verbose=true,rbac.aggregate=false,watchNamespaces={{{namespace}}}"
    return (*images, "--set", values)


@pytest.fixture
def earlier(
    cluster: ClusterHandle,
    no_other_operator: None,
    crd_created: bool,
    images: tuple[str, ...],
    namespace: str,
) -> Iterator[ChartRelease]:
    """The operator and the custom resource definition from the earlier chart."""
    if not crd_created:
        pytest.skip("the test would downgrade the custom resource definition of this cluster")
    # The chart's image stands for this checkout, whose operator also watches TraceReplays and Jobs.
    watched = ("--verb=list,watch", "--resource=tracereplays.goodput.dev,jobs.batch")
    account = f"--serviceaccount={namespace}:goodput"
    cluster.kubectl("create", "role", "replays", *watched, "-n", namespace)
    cluster.kubectl("create", "rolebinding", "replays", "--role=replays", account, "-n", namespace)
    # kubectl has created the definition from this checkout.
    install_chart(
        cluster,
        *("--take-ownership", "--force-conflicts", *chart_options(namespace, *images)),
        chart=EARLIER,
        namespace=namespace,
    )
    yield ChartRelease(cluster=cluster, namespace=namespace)
    uninstall_chart(cluster, namespace=namespace)


@pytest.mark.slow
def test_an_upgrade_replaces_the_operator_and_changes_no_pod_of_a_service(
    earlier: ChartRelease, images: tuple[str, ...]
) -> None:
    def pods() -> dict[str, Any]:
        """Return the uid, the condition Ready and the restarts of each pod of the service."""
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
        return {pod["metadata"]["uid"] for pod in earlier.get(*OPERATOR_PODS)["items"]}

    def definition_differs() -> bool:
        crd = CHART / "files" / "crd-llmservices.yaml"
        try:
            earlier.kubectl("diff", "--server-side", "--force-conflicts", "-f", str(crd))
        except ClusterError:
            return True
        return False

    earlier.apply("chat", replicas=1)
    earlier.wait_settled("chat")
    served, before, key = pods(), operators(), earlier.get("secret", "goodput-key")["data"]
    assert len(served) == 2
    assert definition_differs(), "otherwise the upgrade would show nothing"

    # No image has this tag, so a pod with the new default would not start.
    defaults = ("--set", "engine.tag=later,router.tag=later")
    # The earlier chart has no TraceReplay, whose definition kubectl has created.
    taken = ("--take-ownership", "--force-conflicts")
    upgraded = (*taken, *chart_options(earlier.namespace, *images), *defaults)
    install_chart(earlier.cluster, *upgraded, namespace=earlier.namespace)
    wait_for(lambda: not before & operators(), "the earlier operator has ended")
    [operator] = earlier.get("deployment", "goodput")["spec"]["template"]["spec"]["containers"]
    assert sum(word.endswith(":later") for word in operator["args"]) == 2

    def reconciled() -> bool:
        done = {"event": "phase", "phase": "done", "llmservice": "chat"}
        return any(done.items() <= line.items() for line in earlier.operator_log())

    wait_for(reconciled, "the first reconciliation by the new operator")
    earlier.wait_settled("chat")
    assert pods() == served
    assert not definition_differs()
    assert earlier.get("secret", "goodput-key")["data"] == key
