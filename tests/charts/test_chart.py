"""The rendered chart: its objects, rejected values, and the restrictions of its pods."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.builders.documented import documented_yaml
from tests.charts.rights import documented_rights
from tools.monitoring.alerts import make_rules

from goodput_core.contract import (
    PORT_NAME_ADMIN,
    PORT_NAME_SERVING,
    ROLE_BASELINE,
    ROLE_CANDIDATE,
)

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
def test_the_rendered_chart_equals_its_golden_file(
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
        ("metrics.prometheusRule.minimumRequests=0", "minimumRequests"),
        ("metrics.prometheusRule.runbooks=https://example.com/", "runbooks"),
        ("metrics.dashboards.labels.grafana_dashboard=1", "grafana_dashboard"),
        ("metrics.dashboards.namespace=Monitoring", "namespace"),
        ("page.hosts={a b}", "hosts"),
        ("prometheus.allowedUrls={prometheus:9090}", "allowedUrls"),
        ("pinnedRegistries={ghcr.io/example}", "pinnedRegistries"),
        ("resources.limits.memory=1 GiB", "memory"),
        ("resources.requests.cpu=lots", "cpu"),
        ("image.repository=Ghcr.io/Example", "repository"),
        ("engine.repository=ghcr.io/example/engine:1", "repository"),
        ("router.tag=a b", "tag"),
        ("image.registry=https://mirror", "registry"),
        ("podLabels.app\\.kubernetes\\.io/name=mine", "podLabels"),
        ("podLabels.helm\\.sh/chart=mine", "podLabels"),
        ("extraEnv[0].name=POD_NAME", "extraEnv"),
        ("extraEnv[0].name=a b", "extraEnv"),
        ("networkPolicy.services.clients[0].host=a", "clients"),
    ],
)
def test_an_invalid_value_is_rejected_by_name(helm: Helm, setting: str, named: str) -> None:
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


def test_permissions_are_granted_in_the_watched_namespaces_only(render: Render) -> None:
    documents = render(*SETTINGS["namespaces"])
    assert not [d for d in documents if d["kind"].startswith("ClusterRole")]
    roles = [d for d in documents if d["kind"] == "Role"]
    assert {d["metadata"]["namespace"] for d in roles} == {"chat", "search", "goodput-system"}
    reading = render(*SETTINGS["namespaces"], "--set", "rbac.readNodes=true")
    role = only(reading, "ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    assert only(reading, "ClusterRoleBinding")["roleRef"]["name"] == role["metadata"]["name"]
    arguments = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [a for a in arguments if a.startswith("--namespace=")] == [
        "--namespace=chat",
        "--namespace=search",
    ]


@pytest.mark.parametrize("kind", ["Deployment", "Pod"])
def test_pods_have_no_unneeded_privileges(render: Render, kind: str) -> None:
    found = only(render(*KEY), kind)
    pod = found["spec"]["template"]["spec"] if kind == "Deployment" else found["spec"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }, "no user id, because OpenShift's restricted-v2 assigns one"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]


def test_a_registry_prefixes_every_image_and_a_digest_replaces_the_tag(render: Render) -> None:
    digest = "sha256:" + "0" * 64
    documents = render(
        *KEY, "--set", "image.registry=mirror.example:5000", "--set", f"image.digest={digest}"
    )
    container = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    start = "mirror.example:5000/ghcr.io/example"
    assert container["image"] == f"{start}/goodput-operator@{digest}"
    assert f"--engine-image={start}/goodput-engine:0.1.0" in container["args"]
    assert only(documents, "Pod")["spec"]["containers"][0]["image"] == container["image"]


def test_custom_resource_definitions_are_kept_after_uninstallation_by_default(
    render: Render,
) -> None:
    def definitions(*options: str) -> dict[str, Any]:
        found = [d for d in render(*KEY, *options) if d["kind"] == "CustomResourceDefinition"]
        return {d["metadata"]["name"]: d["metadata"].get("annotations") or {} for d in found}

    names = {"llmservices.goodput.dev", "tracereplays.goodput.dev"}
    kept = definitions()
    assert set(kept) == names
    assert all(one["helm.sh/resource-policy"] == "keep" for one in kept.values())
    going = definitions("--set", "crds.keep=false")
    assert set(going) == names
    assert not any("helm.sh/resource-policy" in one for one in going.values())
    assert definitions("--set", "crds.install=false") == {}


def test_an_existing_key_is_used_and_otherwise_one_is_created(render: Render) -> None:
    documents = render(*KEY)
    assert not [d for d in documents if d["kind"] == "Secret"]
    volumes = only(documents, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["secret"]["secretName"] == "goodput-key"
    made = only(render(), "Secret")
    assert made["metadata"]["name"] == "goodput-key"
    assert len(made["data"]["key"]) > 64
    kept = made["metadata"]["annotations"]["helm.sh/resource-policy"]
    assert kept == "keep", "engines that outlive an installation accept tokens of its key only"


def test_the_documented_permissions_are_those_of_the_chart(render: Render) -> None:
    granted: dict[str, set[str]] = {}
    for role in (d for d in render(*KEY) if d["kind"] in {"Role", "ClusterRole"}):
        if role["metadata"]["name"] in {"goodput", "goodput-lease"}:
            for rule in role["rules"]:
                for resource in rule["resources"]:
                    granted.setdefault(resource, set()).update(rule["verbs"])
    assert granted == documented_rights()


@pytest.mark.parametrize("cpu", ["1", "0.5", "500m", "1e3"])
def test_quantities_are_accepted_as_kubernetes_writes_them(render: Render, cpu: str) -> None:
    documents = render(*KEY, "--set-string", f"resources.requests.cpu={cpu}")
    container = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["requests"]["cpu"] == cpu


def test_dashboards_and_rules_are_installed_only_if_enabled(render: Render) -> None:
    kinds = {d["kind"] for d in render(*KEY)}
    assert not kinds & {"PrometheusRule", "ServiceMonitor", "PodMonitor"}
    assert not [d for d in render(*KEY) if d["kind"] == "ConfigMap"]


def test_dashboards_are_config_maps_that_the_sidecar_finds(render: Render) -> None:
    options = ("--set", "metrics.dashboards.enabled=true,metrics.dashboards.namespace=monitoring",
               "--set", "metrics.dashboards.annotations.grafana_folder=Goodput")  # fmt: skip
    found = [d for d in render(*KEY, *options) if d["kind"] == "ConfigMap"]
    names = [d["metadata"]["name"] for d in found]
    assert names == ["goodput-dashboard-service", "goodput-dashboard-services"]
    for config_map, name in zip(found, ("service", "services"), strict=True):
        assert config_map["metadata"]["namespace"] == "monitoring"
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert config_map["metadata"]["annotations"] == {"grafana_folder": "Goodput"}
        ((file, text),) = config_map["data"].items()
        assert file == f"goodput-{name}.json"
        assert json.loads(text) == json.loads((CHART / f"files/dashboards/{name}.json").read_text())


def test_the_rules_are_those_that_promtool_tests_with_the_charts_values(render: Render) -> None:
    found = only(render(*KEY, "--set", "metrics.prometheusRule.enabled=true"), "PrometheusRule")
    pages = "https://github.com/example/goodput/blob/main/docs/runbooks"
    assert found["spec"] == make_rules(runbooks=pages)
    options = "metrics.prometheusRule.enabled=true,metrics.prometheusRule.minimumRequests=5000000"
    changed = only(render(*KEY, "--set", options), "PrometheusRule")
    assert changed["spec"] == make_rules(minimum_requests="5000000", runbooks=pages)


def test_the_live_page_has_no_rights_and_is_selected_by_no_other_service(render: Render) -> None:
    options = ("--set", "page.enabled=true,page.hosts={goodput.example.org}",
               "--set", "networkPolicy.services.enabled=true,watchNamespaces={chat}")  # fmt: skip
    documents = render(*KEY, *options)
    page, operator = (
        next(d for d in documents if d["kind"] == "Deployment" and d["metadata"]["name"] == name)
        for name in ("goodput-page", "goodput")
    )
    pod = page["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod
    (container,) = pod["containers"]
    assert container["image"] == "ghcr.io/example/goodput-replay:0.1.0"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["args"][2:] == [
        "--services=http://goodput-metrics.goodput-system:8080",
        "--listen=::",
        "--port=8081",
        "--host-name=goodput.example.org",
    ]
    labels = page["spec"]["template"]["metadata"]["labels"]
    selectors = {
        d["metadata"]["name"]: d["spec"]["selector"] for d in documents if d["kind"] == "Service"
    }
    selected = [name for name, one in selectors.items() if one.items() <= labels.items()]
    assert selected == ["goodput-page"]
    assert not operator["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for name in ("goodput-routers", "goodput-engines"):
        policy = next(d for d in documents if d["metadata"]["name"] == name)
        peers = [one["podSelector"]["matchLabels"] for one in policy["spec"]["ingress"][1]["from"]]
        assert labels in peers, "the page reads the admin ports"


def test_engines_of_a_gate_are_scraped_under_their_own_role(render: Render) -> None:
    monitor = only(render(*KEY, "--set", "metrics.podMonitor.enabled=true"), "PodMonitor")
    (_, roles) = monitor["spec"]["selector"]["matchExpressions"]
    assert set(roles["values"]) == {"router", "engine", "candidate", "baseline"}
    ours, others = monitor["spec"]["podMetricsEndpoints"]
    for endpoint, port in ((ours, PORT_NAME_ADMIN), (others, PORT_NAME_SERVING)):
        assert endpoint["port"] == port
        assert "role" in [one.get("targetLabel") for one in endpoint["relabelings"]]
        assert "honorLabels" not in endpoint, "a pod must not choose the namespace of its metrics"


def test_the_documented_scrape_configuration_has_the_rules_of_the_pod_monitor(
    render: Render,
) -> None:
    """The end-to-end test of the dashboards scrapes with the documented configuration."""
    monitor = only(render(*KEY, "--set", "metrics.podMonitor.enabled=true"), "PodMonitor")
    jobs = documented_yaml("dashboards.md", "scrape_configs:")["scrape_configs"]
    # The Prometheus operator adds these labels itself.
    added = ["namespace", "pod"]
    for endpoint, job in zip(monitor["spec"]["podMetricsEndpoints"], jobs[1:], strict=True):
        for rule in endpoint["relabelings"]:
            assert in_snake_case(rule) in job["relabel_configs"]
        for rule in endpoint["metricRelabelings"]:
            assert in_snake_case(rule) in job["metric_relabel_configs"]
        targets = [one["target_label"] for one in job["relabel_configs"] if "target_label" in one]
        ours = [one["targetLabel"] for one in endpoint["relabelings"] if "targetLabel" in one]
        assert sorted(targets) == sorted([*ours, *added])
        selected = [
            one["regex"]
            for one in job["relabel_configs"]
            if one["source_labels"] == ["__meta_kubernetes_pod_container_port_name"]
        ]
        assert selected == [endpoint["port"]]


def in_snake_case(rule: dict[str, Any]) -> dict[str, Any]:
    """Return a rule of a monitor with the names of Prometheus's own configuration."""
    return {re.sub("([A-Z])", lambda one: f"_{one[0].lower()}", key): rule[key] for key in rule}


def test_labels_of_services_metrics_are_kept_by_the_service_monitor(render: Render) -> None:
    monitor = only(render(*KEY, "--set", "metrics.serviceMonitor.enabled=true"), "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["honorLabels"] is True


def test_pod_labels_are_added_and_never_replace_selector_labels(render: Render) -> None:
    forged = "podLabels.app\\.kubernetes\\.io/name=mine"
    documents = render(*KEY, "--set", f"{forged},podLabels.team=x", "--skip-schema-validation")
    deployment = only(documents, "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert labels["team"] == "x"
    assert deployment["selector"]["matchLabels"].items() <= labels.items()


def test_extra_environment_follows_the_environment_of_the_chart(render: Render) -> None:
    extra = '[{"name":"HTTPS_PROXY","value":"http://proxy:3128"}]'
    documents = render(*KEY, "--set-json", f"extraEnv={extra}")
    container = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert [one["name"] for one in container["env"]] == ["POD_NAME", "POD_UID", "HTTPS_PROXY"]


def policies(render: Render, *settings: str) -> dict[tuple[str, str], dict[str, Any]]:
    documents = render(*KEY, "--set", "networkPolicy.services.enabled=true", *settings)
    found = [d for d in documents if d["kind"] == "NetworkPolicy"]
    return {(d["metadata"]["namespace"], d["metadata"]["name"]): d["spec"] for d in found}


def test_network_policies_admit_clients_to_routers_and_routers_to_engines(render: Render) -> None:
    monitoring = (
        '[{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"monitoring"}}}]'
    )
    found = policies(
        render,
        *("--set", "watchNamespaces={chat,search}"),
        *("--set-json", f"networkPolicy.services.monitoring={monitoring}"),
    )
    assert {namespace for namespace, _ in found} == {"goodput-system", "chat", "search"}
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "goodput-system"}},
        "podSelector": found["goodput-system", "goodput"]["podSelector"],
    }
    admins = [
        operator,
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    ]
    routers = found["chat", "goodput-routers"]
    assert routers["podSelector"]["matchLabels"] == {"goodput.dev/role": "router"}
    assert routers["ingress"] == [
        {"ports": [{"port": PORT_NAME_SERVING}]},
        {"ports": [{"port": PORT_NAME_ADMIN}], "from": admins},
    ]
    engines = found["chat", "goodput-engines"]
    assert engines["podSelector"]["matchLabels"] == {"goodput.dev/role": "engine"}
    of_routers = [{"podSelector": {"matchLabels": {"goodput.dev/role": "router"}}}]
    both = [{"port": PORT_NAME_SERVING}, {"port": PORT_NAME_ADMIN}]
    assert engines["ingress"] == [
        {"ports": both, "from": of_routers},
        # Another server than Goodput's engine has its metrics on the serving port.
        {"ports": both, "from": admins},
    ]
    gates = found["chat", "goodput-gates"]
    (roles,) = gates["podSelector"]["matchExpressions"]
    assert roles["values"] == [ROLE_BASELINE, ROLE_CANDIDATE]
    of_replays = [{"podSelector": {"matchLabels": {"goodput.dev/role": "replay"}}}]
    assert gates["ingress"] == [
        {"ports": [{"port": PORT_NAME_SERVING}], "from": of_replays},
        {"ports": both, "from": admins},
    ]
    assert {tuple(spec["policyTypes"]) for key, spec in found.items() if key[0] == "chat"} == {
        ("Ingress",)
    }


def test_network_policies_of_services_require_namespaces(helm: Helm, render: Render) -> None:
    enabled = ("--set", "networkPolicy.services.enabled=true")
    done = helm("template", "goodput", str(CHART), *KEY, *enabled)
    assert done.returncode != 0
    assert "networkPolicy.services.namespaces: list the namespaces" in done.stderr
    found = policies(render, "--set", "networkPolicy.services.namespaces={chat}")
    assert ("chat", "goodput-engines") in found
    clients = 'networkPolicy.services.clients=[{"podSelector":{"matchLabels":{"app":"web"}}}]'
    found = policies(
        render, "--set", "networkPolicy.services.namespaces={chat}", "--set-json", clients
    )
    serving, _ = found["chat", "goodput-routers"]["ingress"]
    replays = {"podSelector": {"matchLabels": {"goodput.dev/role": "replay"}}}
    assert serving["from"] == [{"podSelector": {"matchLabels": {"app": "web"}}}, replays]
    shards = found["chat", "goodput-replays"]
    assert shards["podSelector"] == replays["podSelector"]
    [accepted] = shards["ingress"]
    assert accepted["ports"] == [{"port": PORT_NAME_ADMIN}]
    [operator] = accepted["from"]
    assert operator["podSelector"] == found["goodput-system", "goodput"]["podSelector"]


def test_an_admission_policy_rejects_models_that_pods_cannot_get(render: Render) -> None:
    documents = render(*SETTINGS["namespaces"])
    policy = only(documents, "ValidatingAdmissionPolicy")
    folder, hub = policy["spec"]["validations"]
    assert folder["expression"].startswith("!object.spec.model.source.startsWith('file://')")
    assert folder["message"].startswith("spec.model.source: pods cannot read a folder")
    assert hub["expression"].startswith("!object.spec.model.source.startsWith('hf://')")
    assert hub["message"].startswith("spec.model.revision: is required")
    binding = only(documents, "ValidatingAdmissionPolicyBinding")["spec"]
    assert binding["policyName"] == policy["metadata"]["name"]
    assert binding["validationActions"] == ["Deny"]
    (chosen,) = binding["matchResources"]["namespaceSelector"]["matchExpressions"]
    assert chosen["values"] == ["chat", "search"]
    everywhere = only(render(*KEY), "ValidatingAdmissionPolicyBinding")["spec"]
    assert "matchResources" not in everywhere
    without = render(*KEY, "--set", "admission.enabled=false")
    assert not [d for d in without if d["kind"].startswith("ValidatingAdmission")]
