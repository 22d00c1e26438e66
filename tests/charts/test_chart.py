"""The chart as Helm renders it: what is in it, what it refuses, and how hard its pods are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.charts.rights import documented_rights

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable

    Render = Callable[..., list[dict[str, Any]]]
    Helm = Callable[..., subprocess.CompletedProcess[str]]

CHART = Path(__file__).resolve().parents[2] / "charts/goodput"
KEY = ("--set", "operatorKey.existingSecret=goodput-key")
SETTINGS = {
    "default": KEY,
    "gpu": (*KEY, "--values", str(CHART / "examples/gpu.yaml")),
    "kind": (*KEY, "--values", str(CHART / "examples/kind.yaml")),
    "namespaces": (*KEY, "--set", "watchNamespaces={chat,search}", "--set", "rbac.aggregate=false"),
}


def only(documents: Iterable[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [d for d in documents if d["kind"] == kind]
    return found


@pytest.mark.golden
@pytest.mark.parametrize("name", SETTINGS)
def test_the_chart_renders_as_it_did(
    render: Render, golden: Callable[[str, str], None], name: str
) -> None:
    documents = [d for d in render(*SETTINGS[name]) if d["kind"] != "CustomResourceDefinition"]
    golden(f"{name}.yaml", yaml.safe_dump_all(documents, sort_keys=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_chart_lints(helm: Helm, name: str) -> None:
    done = helm("lint", "--strict", str(CHART), *SETTINGS[name])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("replicas=3", "replicas"),
        ("replicas=0", "replicas"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("image.digest=sha256:abc", "digest"),
        ("image.tagg=1", "tagg"),
        ("watchNamespaces={Chat}", "watchNamespaces"),
        ("verbose=loud", "verbose"),
        ("metrics.serviceMonitor.interval=30", "interval"),
        ("metrics.podMonitor.interval=30", "interval"),
        ("prometheus.allowedUrls={prometheus:9090}", "allowedUrls"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(
    helm: Helm, setting: str, named: str
) -> None:
    done = helm("template", "goodput", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert named in done.stderr


def test_no_role_has_a_wildcard_and_secrets_are_only_created(render: Render) -> None:
    roles = [d for d in render(*KEY) if d["kind"] in {"Role", "ClusterRole"}]
    rules = [rule for role in roles for rule in role["rules"]]
    assert len(rules) > 10
    for rule in rules:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if "secrets" in rule["resources"]:
            assert rule["verbs"] == ["create"]


def test_with_namespaces_given_nothing_is_granted_in_the_others(render: Render) -> None:
    documents = render(*SETTINGS["namespaces"])
    assert not [d for d in documents if d["kind"].startswith("ClusterRole")]
    roles = [d for d in documents if d["kind"] == "Role"]
    assert {d["metadata"]["namespace"] for d in roles} == {"chat", "search", "goodput-system"}
    arguments = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [a for a in arguments if a.startswith("--namespace=")] == [
        "--namespace=chat",
        "--namespace=search",
    ]


@pytest.mark.parametrize("kind", ["Deployment", "Pod"])
def test_pods_may_do_nothing_that_they_need_not(render: Render, kind: str) -> None:
    found = only(render(*KEY), kind)
    pod = found["spec"]["template"]["spec"] if kind == "Deployment" else found["spec"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }, "and no user id: OpenShift's restricted-v2 gives one"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]


def test_a_registry_goes_before_every_image_and_a_digest_wins(render: Render) -> None:
    digest = "sha256:" + "0" * 64
    documents = render(
        *KEY, "--set", "image.registry=mirror.example:5000", "--set", f"image.digest={digest}"
    )
    container = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    start = "mirror.example:5000/ghcr.io/example"
    assert container["image"] == f"{start}/goodput-operator@{digest}"
    assert f"--engine-image={start}/goodput-engine:0.1.0" in container["args"]
    assert only(documents, "Pod")["spec"]["containers"][0]["image"] == container["image"]


def test_definitions_stay_when_the_chart_goes_unless_told_otherwise(render: Render) -> None:
    kept = only(render(*KEY), "CustomResourceDefinition")["metadata"]["annotations"]
    assert kept["helm.sh/resource-policy"] == "keep"
    going = only(render(*KEY, "--set", "crds.keep=false"), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in going["metadata"].get("annotations", {})
    without = render(*KEY, "--set", "crds.install=false")
    assert not [d for d in without if d["kind"] == "CustomResourceDefinition"]


def test_a_key_of_ones_own_is_used_and_none_made(render: Render) -> None:
    documents = render(*KEY)
    assert not [d for d in documents if d["kind"] == "Secret"]
    volumes = only(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["secret"]["secretName"] == "goodput-key"
    made = only(render(), "Secret")
    assert made["metadata"]["name"] == "goodput-key"
    assert len(made["data"]["key"]) > 64
    kept = made["metadata"]["annotations"]["helm.sh/resource-policy"]
    assert kept == "keep", "engines that outlive an installation know tokens of its key alone"


def test_the_documented_rights_are_those_of_the_chart(render: Render) -> None:
    granted: dict[str, set[str]] = {}
    for role in (d for d in render(*KEY) if d["kind"] in {"Role", "ClusterRole"}):
        if role["metadata"]["name"] in {"goodput", "goodput-lease"}:
            for rule in role["rules"]:
                for resource in rule["resources"]:
                    granted.setdefault(resource, set()).update(rule["verbs"])
    assert granted == documented_rights()
