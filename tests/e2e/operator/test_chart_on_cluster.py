"""The chart in a cluster: the API server accepts its objects, and upgrades keep services running.

tests/charts/earlier contains an earlier chart, since a shallow clone lacks the history:

    git archive --prefix=goodput/ COMMIT:charts/goodput | gzip -n > goodput-COMMIT.tgz
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
import yaml
from tests.builders.documented import documented_command, documented_yaml
from tools.cluster.handle import ClusterError, wait_for
from tools.cluster.installing import (
    CHART,
    install_chart,
    rendered_chart,
    run_chart_tests,
    uninstall_chart,
)
from tools.cluster.starting import ROOT
from tools.e2e.clients import PortForward
from tools.e2e.definitions import DefinitionsMissing, defined, module_folder
from tools.e2e.installation import CHAT, OPERATOR_PODS, ChartRelease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools.cluster.handle import ClusterHandle, OwnCluster

EARLIER = ROOT / "tests" / "charts" / "earlier" / "goodput-6833dd7.tgz"
EXAMPLES = CHART / "examples"
VALUES = {
    "default": [],
    "kind": ["--values", str(EXAMPLES / "kind.yaml")],
    # The cluster does not have the kinds of the Prometheus operator; see below.
    "gpu": [
        *("--values", str(EXAMPLES / "gpu.yaml")),
        *("--set", "metrics.serviceMonitor.enabled=false,metrics.podMonitor.enabled=false"),
    ],
}
PAGE = "dashboards.md"
PROMETHEUS_OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.92.1"
MONITORS = ("servicemonitors", "podmonitors", "prometheusrules")
MISTAKES = {
    "an unknown field": ("honorLabels: true", "honourLabels: true", "honourLabels"),
    "a duration without its unit": ("interval: 10s", 'interval: "10"', r"\.interval:"),
    "an unknown action": ("action: labeldrop", "action: drops", r"\.action:"),
    "a duration of an alert in words": ("for: 5m", "for: five minutes", r"\.for:"),
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


@pytest.fixture
def prometheus_operator(own_cluster: OwnCluster) -> Iterator[None]:
    """The Prometheus operator's definitions of its custom resources, from its Go module."""
    try:
        folder = module_folder(PROMETHEUS_OPERATOR) / "example" / "prometheus-operator-crd"
    except DefinitionsMissing as error:
        pytest.skip(f"NOT RUN: {error}")
    files = [folder / f"monitoring.coreos.com_{kind}.yaml" for kind in MONITORS]
    with defined(own_cluster, files):
        yield


@pytest.mark.usefixtures("prometheus_operator")
def test_monitors_and_rules_are_valid_for_the_prometheus_operator(
    own_cluster: OwnCluster, namespace: str
) -> None:
    options = ("--values", str(EXAMPLES / "gpu.yaml"))
    text = rendered_chart(
        *(own_cluster, *options, "--set", "metrics.prometheusRule.enabled=true"),
        namespace=namespace,
    )
    ours = [
        body
        for body in yaml.safe_load_all(text)
        if body and body["apiVersion"].startswith("monitoring.coreos.com/")
    ]
    manifest = yaml.safe_dump_all(ours)
    strictly = ("--server-side", "--dry-run=server", "--validate=strict")
    applied = own_cluster.apply(manifest, *strictly)
    kinds = {line.partition(".")[0] for line in applied.splitlines()}
    assert kinds == {kind.removesuffix("s") for kind in MONITORS}
    for name, (right, wrong, field) in MISTAKES.items():
        assert right in manifest, name
        with pytest.raises(ClusterError, match=field):
            own_cluster.apply(manifest.replace(right, wrong), *strictly)


def test_the_charts_own_test_passes_against_the_installed_release(
    installation: ChartRelease,
) -> None:
    output = run_chart_tests(installation.cluster, namespace=installation.namespace)
    assert "Phase:          Succeeded" in output


def test_the_documented_ingress_and_port_forward_lead_to_the_live_page(
    installation: ChartRelease,
) -> None:
    command = documented_command(PAGE, "kubectl port-forward")
    _, _, flag, namespace, target, ports = command
    assert (flag, namespace) == ("-n", "goodput-system")
    kind, _, name = target.partition("/")
    service = installation.get(kind, name)

    ingress = documented_yaml(PAGE, "kind: Ingress")
    assert ingress["metadata"].pop("namespace") == namespace
    words = ("apply", "--dry-run=server", "--validate=strict", "-f", "-")
    created = installation.kubectl(*words, stdin=yaml.safe_dump(ingress))
    assert "ingress.networking.k8s.io/goodput-page created" in created
    wrong = yaml.safe_dump(ingress).replace("pathType: Prefix", "pathType: Prefixes")
    with pytest.raises(ClusterError, match="pathType"):
        installation.kubectl(*words, stdin=wrong)
    [rule] = ingress["spec"]["rules"]
    [path] = rule["http"]["paths"]
    backend = path["backend"]["service"]
    assert backend["name"] == name
    [port] = service["spec"]["ports"]
    assert backend["port"]["name"] == port["name"]

    # Another local port than the documented one, which a program of this machine may use.
    local, _, remote = ports.partition(":")
    assert port["port"] == int(remote)
    forwarded = PortForward(installation.cluster, installation.namespace, name)
    try:
        request = Request(forwarded.url, headers={"Host": f"localhost:{local}"})
        with urlopen(request, timeout=30) as response:
            assert "<title>" in response.read().decode()
    finally:
        forwarded.close()


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
