"""The rendered objects of a service: golden files, names, selectors and pod security."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.builders.manifests import llmservice as service

from goodput_core.control import Bounds, ServiceParams, Setpoint
from goodput_engine.manifest_file import read_manifest
from goodput_operator.render.base_resources import base_resources
from goodput_operator.render.config_map import config_map, read_setpoint
from goodput_operator.render.metadata import Owner
from goodput_operator.render.pods import Installation
from goodput_operator.render.revisions import (
    engine_deployment,
    engine_revision,
    read_revision,
    router_deployment,
    router_revision,
)
from goodput_operator.render.secrets import secret_name, secret_of, token_secret

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from goodput_core.spec.llmservice import LLMService, LLMServiceSpec

OWNER = Owner(name="chat", namespace="models", uid="5a0c")
LONGEST = Owner(name="c" * 40, namespace="n" * 63, uid="5a0c")
INSTALLATION = Installation(
    engine_image="goodput-engine:1", router_image="goodput-engine:1", fs_group=1000
)


def rendered(llmservice: LLMService, owner: Owner = OWNER) -> list[dict[str, Any]]:
    spec = llmservice.spec
    engines = engine_revision(owner, spec, INSTALLATION, number=1)
    routers = router_revision(owner, spec, INSTALLATION, number=2)
    bounds = Bounds.initial(ServiceParams.of(spec))
    decided = Setpoint(limits_revision=1, bounds=bounds, replicas=spec.initial_replicas)
    token = secret_of(engines.template)
    return [
        *base_resources(owner),
        engines.render(owner),
        routers.render(owner),
        config_map(owner, spec, [engines], decided),
        *(
            [token_secret(owner, token, revision=engines.name, revision_uid="77")]
            if token is not None
            else []
        ),
        engine_deployment(owner, engines, replicas=2, progress_deadline_s=3600),
        router_deployment(owner, routers, replicas=spec.router.replicas),
    ]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


GPU_SERVICE: dict[str, Any] = {
    "model": {
        "source": "hf://Qwen/Qwen3-8B",
        "revision": "abc",
        "cache": {"claimName": "weights", "subPath": "hub"},
        "tokenSecret": {"name": "hub"},
        "offline": True,
    },
    "engine": {
        "drainSeconds": 60,
        "startupDeadlineSeconds": 601,
        "pod": {
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "imagePullSecrets": [{"name": "registry"}],
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "schedulerName": "gang",
            "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nics"}],
            "env": [{"name": "HOME", "value": "/home"}, {"name": "NCCL_DEBUG", "value": "INFO"}],
            "volumes": [{"name": "extra", "emptyDir": {}}],
            "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        },
        "image": "ghcr.io/example/engine:0.1.0",
        "tensorParallel": 2,
        "tokenBudget": {"min": 128, "max": 4096, "initial": 1024},
        "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "64Gi"}},
    },
    "router": {
        "image": "ghcr.io/example/router:0.1.0",
        "tenantsSecret": {"name": "chat-tenants"},
        "resources": {"requests": {"cpu": "1"}},
        "pod": {
            "env": [{"name": "A", "value": "b"}],
            "topologySpreadConstraints": [
                {
                    "maxSkew": 2,
                    "topologyKey": "topology.kubernetes.io/zone",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"goodput.dev/role": "router"}},
                }
            ],
        },
    },
    "minReplicas": 2,
}


CLAIM_SERVICE: dict[str, Any] = {
    "model": {"source": "pvc://weights/chat/v2"},
    "engine": {"resources": {"limits": {"cpu": "4", "memory": "8Gi"}}},
}


VLLM_SERVICE: dict[str, Any] = {
    "model": {"source": "hf://Qwen/Qwen3-8B", "revision": "abc", "cache": {"claimName": "weights"}},
    "engine": {
        "runtime": {
            "kind": "vLLM",
            "image": "vllm/vllm-openai:v0.33.0",
            "args": ["--gpu-memory-utilization", "0.92"],
            "runAsUser": 2000,
        },
        "tokenBudget": {"initial": 4096},
        "maxNumSeqs": 128,
        "tensorParallel": 2,
        "drainSeconds": 60,
        "startupDeadlineSeconds": 900,
        "resources": {"limits": {"nvidia.com/gpu": 2}},
    },
}


SGLANG_SERVICE: dict[str, Any] = {
    "model": VLLM_SERVICE["model"],
    "engine": {
        **VLLM_SERVICE["engine"],
        "runtime": {"kind": "SGLang", "image": "lmsysorg/sglang:v0.5.9"},
    },
}


@pytest.mark.golden
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("least", {}),
        ("gpu", GPU_SERVICE),
        ("claim", CLAIM_SERVICE),
        ("vllm", VLLM_SERVICE),
        ("sglang", SGLANG_SERVICE),
    ],
    ids=["least", "gpu", "claim", "vllm", "sglang"],
)
def test_the_objects_of_a_service_match_the_golden_file(
    name: str, spec: dict[str, Any], golden: Callable[[str, str], None]
) -> None:
    golden(f"resources-{name}.yaml", yaml.safe_dump_all(rendered(service(**spec)), sort_keys=False))


def test_no_name_is_longer_than_63_characters_and_every_object_is_owned() -> None:
    objects = rendered(service(), LONGEST)
    kinds_and_names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(kinds_and_names)) == len(objects)
    assert max(len(name) for _, name in kinds_and_names) <= 63
    for one in objects:
        (reference,) = one["metadata"]["ownerReferences"]
        assert reference["controller"] is True
        labels = one["metadata"]["labels"]
        assert labels["goodput.dev/llmservice"] == LONGEST.name
        assert max(map(len, labels.values())) <= 63


def test_a_pod_is_hardened_and_outlives_its_drain() -> None:
    for deployment in of_kind(rendered(service(**GPU_SERVICE)), "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert "runAsUser" not in pod["securityContext"], "OpenShift's restricted-v2 assigns one"
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        deregister_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        command = container["command"]
        drain_s = int(command[command.index("--grace") + 1].removesuffix("s"))
        assert pod["terminationGracePeriodSeconds"] > deregister_s + drain_s


def test_by_default_deletion_takes_less_than_a_minute_and_routers_outlast_engines() -> None:
    engines, routers = (
        one["spec"]["template"]["spec"] for one in of_kind(rendered(service()), "Deployment")
    )
    # Kubernetes checks a deleted namespace again after half of the longest period and a second, and
    # once more after the same time.
    longest = max(pod["terminationGracePeriodSeconds"] for pod in (engines, routers))
    assert 2 * (longest // 2 + 1) <= 50

    def termination_s(pod: dict[str, Any]) -> int:
        (container,) = pod["containers"]
        command = container["command"]
        deregister_s: int = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        return deregister_s + int(command[command.index("--grace") + 1].removesuffix("s"))

    assert termination_s(engines) < termination_s(routers)


def test_an_engine_has_no_credentials_for_the_api_server() -> None:
    engines, routers = of_kind(rendered(service()), "Deployment")
    assert engines["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert routers["spec"]["template"]["spec"]["serviceAccountName"] == "chat-router"


def test_no_pod_is_in_two_disruption_budgets_and_none_blocks_a_drain() -> None:
    objects = rendered(service())
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in of_kind(objects, "Deployment")]
    for labels in pods:
        budgets = [
            budget
            for budget in of_kind(objects, "PodDisruptionBudget")
            if budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ]
        assert len(budgets) == 1
        assert budgets[0]["spec"]["maxUnavailable"] == 1


def test_every_selector_matches_its_pods() -> None:
    objects = rendered(service())
    engines, routers = (
        one["spec"]["template"]["metadata"]["labels"] for one in of_kind(objects, "Deployment")
    )
    to_engines, to_routers = (one["spec"]["selector"] for one in of_kind(objects, "Service"))
    assert to_engines.items() <= engines.items()
    assert to_routers.items() <= routers.items()
    assert not to_engines.items() <= routers.items()


REVISION_CHANGES = [
    ("model", {"model": {"source": "emulated://unit", "revision": "b"}}, True),
    ("image", {"engine": {"image": "other:2"}}, True),
    ("policy", {"engine": {"policy": "sarathi"}}, True),
    ("default spelt out", {"engine": {"policy": "slo"}}, False),
    ("token budget", {"engine": {"tokenBudget": {"initial": 512}}}, False),
    ("replicas", {"replicas": 3}, False),
    ("control", {"control": {"mode": "Manual"}}, False),
    ("router", {"router": {"policy": "round-robin"}}, False),
    ("classes", {"slo": {"classes": [{"name": "b", "ttftMs": 1, "tpotMs": 1}]}}, False),
]


@pytest.mark.parametrize(
    ("spec", "new"), [c[1:] for c in REVISION_CHANGES], ids=[c[0] for c in REVISION_CHANGES]
)
def test_only_model_and_engine_create_a_new_revision(spec: dict[str, Any], new: bool) -> None:
    before = engine_revision(OWNER, service().spec, INSTALLATION, number=1)
    after = engine_revision(OWNER, service(**spec).spec, INSTALLATION, number=1)
    assert (after.name != before.name) is new
    if not new:
        assert after.template == before.template


def test_fields_that_a_router_reads_at_its_start_create_a_new_revision_of_routers() -> None:
    def name(**spec: Any) -> str:
        return router_revision(OWNER, service(**spec).spec, INSTALLATION, number=1).name

    assert name(router={"replicas": 5}) == name()
    assert name(engine={"policy": "sarathi"}) == name()
    assert name(router={"policy": "round-robin"}) != name()
    assert name(slo={"classes": [{"name": "b", "ttftMs": 1, "tpotMs": 1}]}) != name()


def test_a_stored_revision_is_read_unchanged() -> None:
    made = engine_revision(OWNER, service(**GPU_SERVICE).spec, INSTALLATION, number=7)
    stored = json.loads(json.dumps(made.render(OWNER)))
    assert read_revision(stored, "engine") == made
    assert read_revision(stored, "router") is None
    assert read_revision({**stored, "data": None}, "engine") is None


def test_a_revision_of_an_earlier_version_is_read_and_keeps_its_data() -> None:
    # The API server rejects changes of a ControllerRevision's data.
    made = engine_revision(OWNER, service(**GPU_SERVICE).spec, INSTALLATION, number=7)
    stored = json.loads(json.dumps(made.render(OWNER)))
    stored["data"]["asked"] = stored["data"].pop("source")
    read = read_revision(stored, "engine")
    assert read is not None
    assert (read.name, read.source, read.template) == (made.name, made.source, made.template)
    assert json.loads(json.dumps(read.render(OWNER))) == stored


def test_another_installation_creates_no_revision() -> None:
    other = replace(INSTALLATION, engine_image="goodput-engine:2", fs_group=None)
    spec = service().spec
    before = engine_revision(OWNER, spec, INSTALLATION, number=1)
    after = engine_revision(OWNER, spec, other, number=1)
    assert after.name == before.name
    assert after.template != before.template


def test_engines_and_routers_can_read_their_manifests(tmp_path: Path) -> None:
    spec = service(**GPU_SERVICE).spec
    revision = engine_revision(OWNER, spec, INSTALLATION, number=1)
    decided = Setpoint(limits_revision=3, bounds=Bounds.initial(ServiceParams.of(spec)), replicas=2)
    data = config_map(OWNER, spec, [revision], decided)["data"]
    command = revision.template["spec"]["containers"][0]["command"]
    for key in ("router.json", command[command.index("-f") + 1].rpartition("/")[2]):
        path = tmp_path / key
        path.write_text(data[key], encoding="utf-8")
        read = read_manifest(path)
        assert read.metadata.name == "chat"
        assert read.spec.slo == spec.slo
        assert read.spec.engine.token_budget == spec.engine.token_budget
        assert "image" not in data[key]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("OpenAI", {}), ("vLLM", {"maxNumSeqs": 8, "tokenBudget": {"initial": 64}})],
)
def test_routers_read_the_health_path_of_another_server(
    tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    def of(path: str | None) -> LLMServiceSpec:
        runtime = {"kind": kind, "image": "s:1", "args": ["--x"], "healthPath": path}
        model = {"source": "hf://a/b", "revision": "abc"}
        return service(model=model, engine={"runtime": runtime, **fields}).spec

    spec = of("/healthz")
    decided = Setpoint(limits_revision=3, bounds=Bounds.initial(ServiceParams.of(spec)), replicas=2)
    path = tmp_path / "router.json"
    path.write_text(config_map(OWNER, spec, [], decided)["data"]["router.json"], encoding="utf-8")
    assert read_manifest(path).spec.engine.runtime.health_path == "/healthz"
    names = {
        path: router_revision(OWNER, of(path), INSTALLATION, number=1).name
        for path in ("/healthz", "/live", None)
    }
    assert len(set(names.values())) == 3, "a router reads it when it starts"


def test_a_stored_decision_is_read_unchanged_unless_it_is_invalid() -> None:
    spec = service().spec
    bounds = Bounds(min_tokens=1, max_tokens=2, safety_percent=3, max_num_seqs=4)
    decided = Setpoint(limits_revision=9, bounds=bounds, replicas=0)
    stored = config_map(OWNER, spec, [], decided)
    assert read_setpoint(stored) == decided
    for damage in ({"replicas": "many"}, {"limits.json": "{"}, {"limits.json": "[]"}):
        assert read_setpoint({**stored, "data": {**stored["data"], **damage}}) is None
    assert read_setpoint({"metadata": {}}) is None


@pytest.mark.parametrize(
    ("model", "mounted"),
    [
        ({"source": "hf://a/b"}, {"/var/cache/goodput": "emptyDir"}),
        (
            {"source": "hf://a/b", "cache": {"claimName": "c", "readOnly": True}},
            {"/var/cache/goodput": "persistentVolumeClaim"},
        ),
        ({"source": "pvc://c/d/e"}, {"/var/lib/goodput/claims/c": "persistentVolumeClaim"}),
        ({"source": "emulated://unit"}, {}),
    ],
    ids=["no cache", "a cache", "a claim", "emulated"],
)
def test_weights_are_mounted_from_a_separate_volume(
    model: dict[str, Any], mounted: dict[str, str]
) -> None:
    pod = engine_revision(OWNER, service(model=model).spec, INSTALLATION, number=1).template["spec"]
    volumes = {v["name"]: next(key for key in v if key != "name") for v in pod["volumes"]}
    mounts = {m["mountPath"]: volumes[m["name"]] for m in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"/etc/goodput": "configMap", "/tmp": "emptyDir", **mounted}


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        ("pvc://c/d/e", "c/d/e"),
        ("pvc://c", "c"),
        ("pvc://c/", "c"),
        ("pvc://c//d/", "c/d"),
        ("pvc://c/$(HOME)", "c/$$(HOME)"),
    ],
    ids=["a folder", "the root", "the root with a slash", "more slashes", "not a variable"],
)
def test_an_engine_computes_the_model_in_the_mounted_folder(source: str, folder: str) -> None:
    spec = service(model__source=source).spec
    pod = engine_revision(OWNER, spec, INSTALLATION, number=1).template["spec"]
    (container,) = pod["containers"]
    words = container["command"]
    assert words[words.index("--model-path") + 1] == f"/var/lib/goodput/claims/{folder}"
    (volume,) = [v for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert volume["persistentVolumeClaim"] == {"claimName": "c", "readOnly": True}
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
    assert mount["readOnly"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        ({}, None),
        ({"limits": {"memory": "1Gi"}}, None),
        ({"limits": {"cpu": "4"}, "requests": {"cpu": "2"}}, "3"),
        ({"requests": {"cpu": "2500m"}}, "1"),
        ({"limits": {"cpu": "500m"}}, "1"),
    ],
    ids=["none", "no CPU", "the limit", "the request", "less than a CPU"],
)
def test_the_computing_threads_of_a_real_model_follow_the_cpus(
    resources: dict[str, Any], threads: str | None
) -> None:
    def command(source: str) -> list[str]:
        spec = service(model__source=source, engine__resources=resources).spec
        pod = engine_revision(OWNER, spec, INSTALLATION, number=1).template["spec"]
        words: list[str] = pod["containers"][0]["command"]
        return words

    for source in ("pvc://c/d", "hf://a/b"):
        words = command(source)
        given = words[words.index("--threads") + 1] if "--threads" in words else None
        assert given == threads
    assert "--threads" not in command("emulated://unit"), "an emulated device computes nothing"


def test_pods_read_the_threads_of_the_manifest_in_place_of_the_cpus() -> None:
    spec = service(
        model__source="hf://a/b",
        engine__resources={"limits": {"cpu": "4"}},
        engine__realModel={"threads": 2},
    ).spec
    pod = engine_revision(OWNER, spec, INSTALLATION, number=1).template["spec"]
    assert "--threads" not in pod["containers"][0]["command"]


def test_the_http_processes_of_a_pod_leave_the_other_cpus_for_threads() -> None:
    spec = service(
        model__source="hf://a/b", engine__resources={"limits": {"cpu": 8}}, engine__httpProcesses=3
    ).spec
    revision = engine_revision(OWNER, spec, INSTALLATION, number=1)
    words = revision.template["spec"]["containers"][0]["command"]
    assert words[words.index("--threads") + 1] == "5"
    assert revision.source["engine"]["httpProcesses"] == 3, "the engine reads its manifest"


def test_a_variable_set_by_the_service_occurs_once() -> None:
    (engines, _) = of_kind(rendered(service(**GPU_SERVICE)), "Deployment")
    env = engines["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [one["value"] for one in env if one["name"] == "HOME"] == ["/home"]
    assert len({one["name"] for one in env}) == len(env)


def test_tensor_parallel_engines_share_memory() -> None:
    (engines, _) = of_kind(rendered(service(**GPU_SERVICE)), "Deployment")
    pod = engines["spec"]["template"]["spec"]
    (volume,) = [v for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    assert mounts[volume["name"]] == "/dev/shm"


def test_a_later_service_of_the_same_name_has_another_secret_for_the_same_revision() -> None:
    before, after = (replace(OWNER, uid=uid) for uid in ("one", "another"))
    spec = service().spec
    revisions = [engine_revision(o, spec, INSTALLATION, number=1) for o in (before, after)]
    assert revisions[0].name == revisions[1].name
    names = [secret_of(revision.template) for revision in revisions]
    assert names == [secret_name(before, revisions[0].name), secret_name(after, revisions[1].name)]
    assert names[0] != names[1]


def test_the_longest_name_of_a_secret_is_valid() -> None:
    longest = replace(OWNER, name="a" * 40)
    revision = engine_revision(longest, service().spec, INSTALLATION, number=1)
    assert len(secret_name(longest, revision.name)) <= 63
